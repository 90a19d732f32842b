r"""The spectral gaps of the random walk $g \to g\sigma$ of a set of permutations on S_n, and of its walk on n streams.

The walk multiplies g by a random σ of the set's K permutations. Its n! × n! matrix splits into the blocks $M_\lambda =
\frac1K\sum_\sigma \rho_\lambda(\sigma)$ of all partitions λ of n, with the irreducible representations $\rho_\lambda$
of dimension d_λ; each block occurs d_λ times. The block of (n) is λ₁ = 1, and |λ₂| is the largest spectral radius of
the other blocks. The walk on the streams has the blocks of (n) and (n − 1, 1).
"""

from fractions import Fraction

import numpy as np
from numpy.typing import ArrayLike, NDArray

from jpmhc.paper.generators import representations, symmetric_group
from jpmhc.paper.generators.exact_radius import EXACT_DEGREE, ExactSpectrum


def transition_matrix(perms: ArrayLike) -> NDArray[np.float64]:
    """Return the n! × n! matrix T of the walk, with T[g, gσ] = 1/K (alg. spectral-gap-search), for n ≤ 6."""
    perms = symmetric_group.as_permutations(perms)
    size, n = perms.shape
    if n > 6:
        raise ValueError(
            f"the plain matrix of S_{n} has {len(symmetric_group.elements(n))} rows; it is formed for n ≤ 6 only"
        )
    group = symmetric_group.elements(n)
    matrix = np.zeros((len(group), len(group)))
    for sigma in perms:
        matrix[np.arange(len(group)), symmetric_group.rank(group[:, sigma])] += 1 / size
    return matrix


def spectral_gap(perms: ArrayLike) -> float:
    r"""Return the spectral gap $\Delta = |\lambda_1| - |\lambda_2|$ of the walk on S_n (alg. spectral-gap-search).

    The gap is exactly 0 if the set does not generate S_n, or if all permutations are odd, which makes the walk
    periodic. For n ≤ 7 the eigenvalues are roots of exact characteristic polynomials. For n = 8 they are computed from
    the blocks in floating point, with errors of 1e-8 and more for defective blocks.

    Args:
        perms: Distinct permutations σ as rows σ(0), …, σ(n − 1), with n from 2 to 8. [K, n]

    >>> round(spectral_gap([[0, 1, 2], [1, 0, 2], [1, 2, 0]]), 3)
    0.667
    """
    perms = symmetric_group.as_permutations(perms)
    if symmetric_group.is_odd(perms).all() or not symmetric_group.generates(perms):
        return 0.0
    return 1.0 - max(_find_radii(perms, representations.nontrivial_partitions(perms.shape[1])))


def plain_spectral_gap(perms: ArrayLike) -> float:
    """Return the gap of the walk on S_n from the eigenvalues of its n! × n! matrix (the paper's way), for n ≤ 6."""
    moduli = np.sort(np.abs(np.linalg.eigvals(transition_matrix(perms))))
    return float(moduli[-1] - moduli[-2])


def stream_gap(perms: ArrayLike) -> float:
    r"""Return the gap $1 - |\lambda_2|$ of the walk on n streams, whose matrix is the mean permutation matrix."""
    perms = symmetric_group.as_permutations(perms)
    n = perms.shape[1]
    # For n = 2 the representation (n − 1, 1) is the sign (1, 1).
    return 1.0 - min(1.0, max(_find_radii(perms, [(n - 1, 1)])))


def _find_radii(perms: NDArray[np.int64], shapes: list[representations.Partition]) -> list[float]:
    if perms.shape[1] <= EXACT_DEGREE:
        spectrum = ExactSpectrum(perms)
        return [spectrum.radius(shape) for shape in shapes]
    return [float_radius(representations.represent(shape, perms).mean(axis=0)) for shape in shapes]


def float_radius(block: NDArray[np.float64]) -> float:
    """Return the spectral radius of one block of a walk, computed in floating point."""
    return float(np.abs(np.linalg.eigvals(block)).max())


def gap_bound(n: int, size: int, reversible: bool = False) -> float:
    r"""Return an upper bound on `spectral_gap` for all sets of `size` permutations of n streams.

    For a block $M_\lambda$ of the walk of K permutations, the characteristic polynomial of $K M_\lambda$ has integer
    coefficients. Unless every block is nilpotent, some product of eigenvalues is therefore a nonzero integer, and
    $|\lambda_2| \ge 1/K$. If all blocks are nilpotent, some power of the walk's matrix is uniform, so that n! divides a
    power of K. For a set closed under inverses, every closed walk on the K-regular tree gives a product of permutations
    that is the identity; the number of these walks is a lower bound on the traces of even powers.
    """
    order = len(symmetric_group.elements(n))
    radius = 0.0
    if any(size % prime for prime in (2, 3, 5, 7) if prime <= n):
        radius = 1 / size
    if reversible:
        for half_length, closed in enumerate(_count_closed_walks(size, 64), start=1):
            excess = Fraction(order * closed, size ** (2 * half_length)) - 1
            if order > 1 and excess > 0:
                radius = max(radius, float(excess / (order - 1)) ** (1 / (2 * half_length)))
    return 1.0 - radius


def _count_closed_walks(degree: int, count: int) -> list[int]:
    """Return the numbers of closed walks of length 2, 4, …, 2·count from a vertex of the infinite regular tree."""
    walks, closed = [1], []
    for step in range(1, 2 * count + 1):
        out = [walks[0] * degree, *(w * (degree - 1) for w in walks[1:])]
        walks = [back + ahead for back, ahead in zip([*walks[1:], 0, 0], [0, *out])]
        if step % 2 == 0:
            closed.append(walks[0])
    return closed
