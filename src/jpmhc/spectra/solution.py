"""What every method returns: the Cauchy transform at the points asked, and how far to trust each of them."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, eq=False)
class Solution:
    r"""The Cauchy transform $G(z) = \lim \frac{1}{N} \mathrm{Tr}(z - J^\top J)^{-1}$.

    Attributes:
        G: The values; where `converged` is false, the last iterate, never to be used as an answer. [...] complex
        converged: Whether the point's residual fell below the tolerance. [...] bool
        residual: What is left of the method's own equation at the point. [...]
        iterations: How many iterations the point took. [...] int
        method: The method's name in `solve.METHODS`.
        exact: Whether the method's equation is exact for this network (in the limit of many features per stream).
        note: What the user should know beyond the numbers, such as the case in which the method is not exact.
    """

    G: Tensor
    converged: Tensor
    residual: Tensor
    iterations: Tensor
    method: str
    exact: bool = True
    note: str = ""
