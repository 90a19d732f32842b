r"""The orthogonal group, reached by the Cayley transform of a skew-symmetric matrix.

With $K = \tfrac{\alpha}{2}(M - M^\top)$ the transform is $H = (I + K)(I - K)^{-1}$. Up to n = 4 it is a polynomial in K
over a positive scalar (docs/derivations/cayley.md), so no matrix is factored; beyond, it is one small solve.
"""

import torch
from torch import Tensor

from jpmhc import checks


def project(matrix: Tensor, scale: float = 0.1, iterations: int | None = None) -> Tensor:
    r"""Orthogonal matrices from unconstrained ones.

    Args:
        matrix: Only its skew part counts: $W = M - M^\top$ (eq. skew-sym). [..., n, n]
        scale: The paper's step size α, 0.1 by default.
        iterations: None gives the exact transform (eq. cayley-closed); an integer s gives the paper's fixed-point
            iteration (s = 2 there), which is orthogonal only for small entries.

    Returns:
        Matrices with determinant +1. [..., n, n]

    Note:
        The two signs in the paper are inverses of each other; this is the appendix's, which the iteration converges to.
    """
    n = checks.square(matrix)
    checks.at_least_one(iterations, "iterations")
    checks.number(scale, "scale")
    matrix = checks.working(checks.finite(matrix, "matrix"))
    with checks.uncast(matrix):
        k = (matrix - matrix.mT) * (scale / 2)
        identity = torch.eye(n, dtype=k.dtype, device=k.device)
        if iterations is not None:
            y = identity + 2 * k  # eq. cayley-init
            for _ in range(iterations):
                y = identity + k @ (identity + y)  # eq. cayley-iter-main
            return y
        exact = _cayley_polynomial(k, identity) if n <= 4 else torch.linalg.solve(identity - k, identity + k)
        return checks.finite(exact, "entries are too large for this precision: their Cayley transform")


def violation(matrix: Tensor) -> Tensor:
    r"""How far the columns are from orthonormal: the largest entry of $|H^\top H - I|$. [...]"""
    checks.tall(matrix)
    with checks.uncast(matrix):
        gram = matrix.mT @ matrix
    return (gram - torch.eye(gram.shape[-1], dtype=gram.dtype, device=gram.device)).abs().amax((-2, -1))


def sample(
    n: int,
    shape: tuple[int, ...] = (),
    *,
    generator: torch.Generator | None = None,
    dtype: torch.dtype = torch.float64,
    device: torch.device | str | None = None,
) -> Tensor:
    """Haar-distributed orthogonal matrices, both determinants. [*shape, n, n]"""
    checks.at_least_one(n, "n")
    gaussian = torch.randn(*shape, n, n, generator=generator, dtype=torch.float64, device=device)
    q, r = torch.linalg.qr(gaussian)
    # Without the signs of R's diagonal, Q is not uniform.
    return (q * r.diagonal(dim1=-2, dim2=-1).sign().unsqueeze(-2)).to(dtype)


def _cayley_polynomial(k: Tensor, identity: Tensor) -> Tensor:
    r"""$[(1 + s - f^2) I + 2K^2 + 2K + 2 f K^*] / (1 + s + f^2)$ for n <= 4.

    s is the sum of the squares above the diagonal, f the Pfaffian and $K^*$ the dual of K (both zero below n = 4).
    """
    s = k.square().sum((-2, -1), keepdim=True) / 2
    if k.shape[-1] < 4:
        return identity + 2 * (k @ k + k) / (1 + s)
    a, b, c, d, e, f = (k[..., i, j] for i, j in ((0, 1), (0, 2), (0, 3), (1, 2), (1, 3), (2, 3)))
    pfaffian = (a * f - b * e + c * d)[..., None, None]
    zero = torch.zeros_like(a)
    rows = ([zero, f, -e, d], [-f, zero, c, -b], [e, -c, zero, a], [-d, b, -a, zero])
    dual = torch.stack([torch.stack(row, -1) for row in rows], -2)
    numerator = (1 + s - pfaffian.square()) * identity + 2 * (k @ k + k + pfaffian * dual)
    return numerator / (1 + s + pfaffian.square())
