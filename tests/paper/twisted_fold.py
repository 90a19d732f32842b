r"""The matrix-valued S-transforms of one layer and of a product of layers, at a given W (appendix "Dykema").

These functions follow the paper's nested computation; `jpmhc.paper.twisted` must compute the Cauchy transform of the
same product.
"""

import torch
from torch import Tensor

from jpmhc.paper.twisted import Factors
from jpmhc.spectra.fixed_point import Equation, Options, solve
from jpmhc.spectra.schemes import Newton


def psi_inverse(
    factor: Factors, w: Tensor, start: Tensor, tolerance: float = 1e-13, maximum: int = 50
) -> tuple[Tensor, Tensor, Tensor]:
    r"""Solve the Ψ-inversion of one layer, $G(b)\, b - 1 = W$ for $b$, and return the S-transform $W^{-1} G(b)$.

    G is the layer's matrix-valued Cauchy transform. Because $G(b)^{-1} = b - S^{-1}$ the equation is $G(b) = W S$. The
    only unknowns are the self-energies $\alpha$ and $\beta$ in $S^{-1}$ (`Factors.inverse_s`;
    docs/derivations/paper_methods.md), whose first iterates are `start` [B, 2] and whose relative tolerance is given. W
    is [B, n, n]. Returns $S(W)$ [B, n, n], $b$ [B, n, n] and a mask of the rows that converged [B].

    Note: The paper's eq. ov_s_transform has $b\, G(b) - 1 = W$ and $S = G(b) W^{-1}$. This is the mirror image of
    Dykema's definition; with it the factors of eq. twisted_product would have to be reversed.
    """

    nowhere = torch.zeros(len(w), dtype=w.dtype, device=w.device)  # the equation has W in its rows and uses no points
    solution = solve(_SelfEnergies(factor, w), nowhere, start, Options(Newton(), tolerance, maximum))
    inverse = factor.inverse_s(solution.x[:, :1], solution.x[:, 1:])[0].squeeze(1)
    s = torch.linalg.inv_ex(inverse)[0]
    b = torch.linalg.inv_ex(w @ s)[0] + inverse  # eq. ov_s_transform, in Dykema's order
    return s, b, solution.converged


class _SelfEnergies(Equation):
    """The two self-energies of one layer at the matrices W of all rows."""

    def __init__(self, factor: Factors, w: Tensor) -> None:
        self.factor, self.w = factor, w

    def image(self, x: Tensor, z: Tensor, index: Tensor) -> Tensor:
        inverse, u = self.factor.inverse_s(x[:, :1], x[:, 1:])
        s = torch.linalg.inv_ex(inverse)[0]  # [b, 1, n, n]
        return torch.cat(self.factor.orders(self.w[index].unsqueeze(1) @ s, u), -1)


def twisted_fold(factors: Factors, w: Tensor, start: Tensor) -> tuple[Tensor, Tensor]:
    r"""Compute the S-transform of the product $x_L \cdots x_1$ at $W$ [B, n, n], layer by layer (eq. twisted_fold).

    `start` [B, 2L] has the first iterates of the layers' $\alpha$ and $\beta$ (`Factors`), all $\alpha$ first. Returns
    $S(W)$ [B, n, n] and a mask of the rows in which every layer's Ψ-inversion converged [B].
    """
    depth = len(factors.skip)
    total = torch.eye(w.shape[-1], dtype=w.dtype, device=w.device).expand_as(w)
    good = torch.ones(len(w), dtype=torch.bool, device=w.device)
    for layer in range(depth):
        factor = Factors(*(part[layer : layer + 1] for part in factors))
        s, _, converged = psi_inverse(factor, w, start[:, [layer, depth + layer]])
        total, good = total @ s, good & converged
        w = torch.linalg.solve_ex(s, w @ s)[0]  # S⁻¹ W S of eq. twisted_product
    return total, good
