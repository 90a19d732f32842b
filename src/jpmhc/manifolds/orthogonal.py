r"""The orthogonal group, reached by the Cayley transform of a skew-symmetric matrix.

For any matrix M and the step size α the transform is $H = (I + K)(I - K)^{-1}$ with $K = \tfrac{\alpha}{2}(M -
M^\top)$. Up to n = 4, H is a polynomial in K divided by a positive number (docs/derivations/cayley.md), so no matrix is
factored. Above n = 4, H is the solution of a linear system, for entries of K up to 1e8.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from jpmhc import checks, precision

# Above n = 4, a larger entry of K makes the transform NaN: the solution would have fewer than eight digits.
LARGEST = 1e8
# The dual of a skew 4 × 4 matrix exchanges the entries (0,1) and (2,3), (0,2) and (3,1), (0,3) and (1,2). These are the
# indices in the dual of the entries above the diagonal.
_DUAL = ((2, 3), (3, 1), (1, 2), (0, 3), (2, 0), (0, 1))


def project(matrix: Tensor, scale: float = 0.1, iterations: int | None = None) -> Tensor:
    r"""Turn any square matrices into orthogonal ones.

    Args:
        matrix: Matrices M, of which only the skew part $W = M - M^\top$ counts (eq. skew-sym). [..., n, n]
        scale: The paper's step size α.
        iterations: None gives the exact transform (eq. cayley-closed); an integer s gives the paper's fixed-point
            iteration (s = 2 in the paper), which is orthogonal only for small entries.

    Returns:
        Orthogonal matrices with determinant +1, approximately if `iterations` is given. [..., n, n]

    Note:
        The paper has two signs of the transform, which give H and its inverse. This is the appendix's sign, to which
        the paper's iteration converges.

    >>> matrix = project(torch.randn(4, 4))
    >>> bool(((matrix @ matrix.mT - torch.eye(4)).abs() < 1e-6).all())
    True
    """
    checks.square(matrix)
    checks.optional_whole_number(iterations, "iterations")
    checks.finite_number(scale, "scale")
    matrix = precision.single_or_double(matrix)
    with precision.without_autocast(matrix):
        wide = matrix.double()  # large entries make the transform inexact in float32
        return cayley((wide - wide.mT) * (scale / 2), iterations).to(matrix.dtype)  # eq. skew-sym, times α/2


def skew(entries: Tensor, n: int) -> Tensor:
    """Return the skew matrix with `entries` above the diagonal, row by row. [..., n(n-1)/2] → [..., n, n]"""
    _check_entries(entries, n)
    return _make_skew(entries.unbind(-1), n, _above_diagonal(n)).squeeze(-3)


def _check_entries(entries: Tensor, n: int) -> None:
    """Raise a ValueError unless there is one entry for each place above the diagonal of an n × n matrix."""
    needed, given = n * (n - 1) // 2, list(entries.shape)
    if given[-1:] != [needed]:
        raise ValueError(f"a skew {n} × {n} matrix has {needed} entries above its diagonal, got the shape {given}")


def _above_diagonal(n: int) -> list[tuple[int, int]]:
    return [(i, j) for i in range(n) for j in range(i + 1, n)]


def _make_skew(entries: Sequence[Tensor], n: int, *positions: Sequence[tuple[int, int]]) -> Tensor:
    """Return one skew matrix per list in `positions`; a list has each entry's (row, column). [..., m, n, n]"""
    cells = [torch.zeros_like(entries[0])] * (len(positions) * n * n)
    for m, pairs in enumerate(positions):
        for entry, (i, j) in zip(entries, pairs):
            cells[(m * n + i) * n + j] = entry
    half = torch.stack(cells, -1).unflatten(-1, (len(positions), n, n))
    return half - half.mT


def cayley_of_entries(entries: Tensor, n: int, iterations: int | None = None) -> Tensor:
    """Return the Cayley transform of the matrix `skew(entries, n)`. [..., n(n-1)/2] → [..., n, n]"""
    if n != 4 or iterations is not None:
        return cayley(skew(entries, n), iterations)
    _check_entries(entries, 4)
    k, dual = _make_skew(entries.unbind(-1), 4, _above_diagonal(4), _DUAL).unbind(-3)
    return _cayley_polynomial(k, dual)


def cayley(k: Tensor, iterations: int | None = None) -> Tensor:
    r"""Return the Cayley transform $(I + K)(I - K)^{-1}$ of skew matrices K. [..., n, n]

    `iterations` is the number of the paper's fixed-point iterations; None gives the exact transform.
    """
    checks.square(k, "k")
    n = k.shape[-1]
    identity = torch.eye(n, dtype=k.dtype, device=k.device)
    if iterations is not None:
        y = identity + 2 * k  # eq. cayley-init
        for _ in range(iterations):
            y = identity + k @ (identity + y)  # eq. cayley-iter-main
        return y
    if n > 4:
        # eq. cayley-closed; NaN for NaN, where `solve` would raise
        transform = torch.linalg.solve_ex(identity - k, identity + k).result
        return torch.where(k.detach().abs().amax((-2, -1), keepdim=True) <= LARGEST, transform, torch.nan)
    if n < 4:
        return _cayley_polynomial(k, None)
    entries = [k[..., i, j] for i, j in _above_diagonal(4)]
    return _cayley_polynomial(k, _make_skew(entries, 4, _DUAL).squeeze(-3))


def violation(matrix: Tensor) -> Tensor:
    r"""Return the largest entry of $|H^\top H - I|$, zero if the columns are orthonormal. [...]

    >>> float(violation(torch.eye(2)))
    0.0
    """
    checks.tall(matrix)
    with precision.without_autocast(matrix):
        gram = matrix.mT @ matrix
    return (gram - torch.eye(gram.shape[-1], dtype=gram.dtype, device=gram.device)).abs().amax((-2, -1))


def sample(n: int, shape: tuple[int, ...] = (), *, generator: torch.Generator | None = None) -> Tensor:
    """Draw Haar-distributed orthogonal matrices, with determinants 1 and -1. [*shape, n, n]

    >>> sample(4, (3,)).shape
    torch.Size([3, 4, 4])
    """
    checks.whole_number(n, "n")
    return to_haar(torch.randn(*checks.sizes(shape, "shape"), n, n, generator=generator, dtype=torch.float64))


def to_haar(gaussian: Tensor) -> Tensor:
    """Turn matrices of independent normal numbers into Haar-distributed orthogonal matrices. [..., n, n]"""
    q, r = torch.linalg.qr(gaussian)
    # Without the signs of R's diagonal, Q is not uniform.
    return q * r.diagonal(dim1=-2, dim2=-1).sign().unsqueeze(-2)


def _cayley_polynomial(k: Tensor, dual: Tensor | None) -> Tensor:
    r"""Return the Cayley transform $I + 2 (K^2 + K + f K^* - f^2 I) / (1 + s + f^2)$ of skew matrices K with n <= 4.

    s is the sum of the squares above the diagonal of K, f the Pfaffian of K, and $K^*$ the dual of K. Below n = 4, f
    and $K^*$ are zero, and the argument `dual` is None.
    """
    identity = torch.eye(k.shape[-1], dtype=k.dtype, device=k.device)
    twice, total = (k * k).sum((-2, -1), keepdim=True) + 2, k  # 2 (1 + s)
    if dual is not None:
        f = (k * dual).sum((-2, -1), keepdim=True)  # four times the Pfaffian
        square = f * f
        total = torch.addcmul(k, f, dual, value=1 / 4).addcmul(square, identity, value=-1 / 16)
        twice = torch.add(twice, square, alpha=1 / 8)
    total = torch.baddbmm(total, k, k) if k.ndim == 3 else total + k @ k  # the former is one operator
    return torch.addcdiv(identity, total, twice, value=4)
