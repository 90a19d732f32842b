r"""Spectral radii of $A_\lambda = \sum_{\sigma\in S} \rho_\lambda(\sigma)$ from exact characteristic polynomials.

S is a set of permutations and $\rho_\lambda$ an irreducible representation (random_walk.py). The matrix of a walk that
is not reversible may be defective, and rounding moves an eigenvalue in a Jordan block of size m by $\varepsilon^{1/m}$:
1e-8, 1e-5, 1e-4, … The characteristic polynomial of $A_\lambda$ has integer coefficients, which are computed without
rounding from powers of $\sum\sigma$ in the integral group ring, characters and Newton's identities. The roots of its
squarefree part are simple, and Newton's method in integer arithmetic computes them to full precision.
"""

from functools import lru_cache
from math import gcd, hypot

import numpy as np
from numpy.typing import NDArray

from jpmhc.paper.generators import representations, symmetric_group

# The largest n for which radii are exact: for n = 8 polynomials of degree 90 would take minutes per set.
EXACT_DEGREE = 7
# The fraction bits of a fixed-point root, and the number of last bits that may still change at convergence.
BITS, CONVERGED_BITS = 96, 24

Polynomial = list[int]  # highest power first


@lru_cache
def _classes(n: int) -> tuple[NDArray[np.int64], NDArray[np.int64], dict[representations.Partition, list[int]]]:
    """Return the conjugacy classes of S_n and the character table.

    The classes are the ranks of all elements, sorted by class, and the first index of each class.
    """
    group = symmetric_group.elements(n)
    identity = np.arange(n)
    power, fixed = group, []
    for _ in range(n):  # the numbers of fixed points of g, g², …, gⁿ determine the cycle type
        fixed.append((power == identity).sum(axis=1))
        power = symmetric_group.compose(power, group)
    _, label = np.unique(np.stack(fixed, axis=1), axis=0, return_inverse=True)
    label = label.reshape(-1)
    order = np.argsort(label, kind="stable")
    starts = np.searchsorted(label[order], np.arange(label.max() + 1))
    representatives = group[order[starts]]
    characters = {
        shape: np.rint(np.trace(representations.represent(shape, representatives), axis1=-2, axis2=-1))
        .astype(int)
        .tolist()
        for shape in representations.partitions(n)
    }
    return order, starts, characters


class ExactSpectrum:
    """The exact spectral radii of the blocks of a set's walk, one per irreducible representation.

    Args:
        perms: Distinct permutations, [K, n] with n ≤ 7.
    """

    def __init__(self, perms: NDArray[np.int64]):
        self.perms = perms
        self.size, self.n = perms.shape
        group = symmetric_group.elements(self.n)
        # (Σσ)ᵏ⁺¹ at g is the sum of (Σσ)ᵏ at gσ⁻¹.
        self._sources = [symmetric_group.rank(group[:, symmetric_group.inverse(p)]) for p in perms]
        self._power: NDArray | None = None
        self._class_totals: list[list[int]] = []

    def power_sums(self, shape: representations.Partition, count: int) -> list[int]:
        r"""Return the integers $\mathrm{tr}\,A_\lambda^k$ for k = 1, …, count; `shape` is the partition λ."""
        order, starts, characters = _classes(self.n)
        while len(self._class_totals) < count:
            if self._power is None:
                self._power = np.zeros(len(order), dtype=np.int64)
                self._power[0] = 1
            elif self.size ** (len(self._class_totals) + 1) >= 2**62 and self._power.dtype != object:
                self._power = self._power.astype(object)  # Python integers from here on
            self._power = np.sum([self._power[source] for source in self._sources], axis=0)
            self._class_totals.append([int(x) for x in np.add.reduceat(self._power[order], starts)])
        return [sum(c * t for c, t in zip(characters[shape], totals)) for totals in self._class_totals[:count]]

    def characteristic_polynomial(self, shape: representations.Partition) -> Polynomial:
        r"""Return the coefficients of $\det(x - A_\lambda)$, by Newton's identities; `shape` is the partition λ."""
        size = representations.dimension(shape)
        sums = self.power_sums(shape, size)
        coefficients = [1]
        for k in range(1, size + 1):
            coefficients.append(-sum(coefficients[k - i] * sums[i - 1] for i in range(1, k + 1)) // k)
        return coefficients

    def radius(self, shape: representations.Partition) -> float:
        r"""Return the spectral radius of the walk's block $A_\lambda / K$ for K permutations; `shape` is λ."""
        polynomial = squarefree(self.characteristic_polynomial(shape))
        if len(polynomial) == 1:  # nilpotent
            return 0.0
        block = representations.represent(shape, self.perms).sum(axis=0)
        return max(map(abs, find_roots(polynomial, np.linalg.eigvals(block)))) / self.size


def squarefree(polynomial: Polynomial) -> Polynomial:
    """Return the polynomial whose simple roots are all roots of `polynomial` other than zero.

    Its coefficients have no common divisor.
    """
    degree = max(k for k, c in enumerate(polynomial) if c)
    polynomial = polynomial[: degree + 1]
    common, rest = polynomial, _derivative(polynomial)
    while any(rest):
        common, rest = rest, _primitive(_divide(common, rest)[1])
    return _primitive(_divide(polynomial, common)[0])


def find_roots(polynomial: Polynomial, guesses: NDArray) -> list[complex]:
    """Find all roots of a squarefree polynomial from guesses, by Newton's method in integer arithmetic.

    If the guesses do not lead to as many roots as the degree, the eigenvalues of the companion matrix are used as
    guesses too.

    Raises:
        ArithmeticError: If a root is still missing.
    """
    degree = len(polynomial) - 1
    roots: list[tuple[int, int]] = []
    companion = np.roots(np.array(polynomial, dtype=float))
    for guess in [*guesses.tolist(), *companion.tolist()]:
        root = _newton(polynomial, complex(guess))
        if root is not None and not any(hypot(root[0] - a, root[1] - b) < 2.0 ** (BITS // 2) for a, b in roots):
            roots.append(root)
            if len(roots) == degree:
                return [complex(a / 2**BITS, b / 2**BITS) for a, b in roots]
    raise ArithmeticError(f"found {len(roots)} of the {degree} roots of {polynomial}")


def _newton(polynomial: Polynomial, guess: complex, iterations: int = 60) -> tuple[int, int] | None:
    """Return one root, or None if the iteration does not converge.

    The root's real and imaginary parts are integers, multiplied by 2^BITS.
    """
    a, b = int(guess.real * 2**BITS), int(guess.imag * 2**BITS)
    for _ in range(iterations):
        # Horner's rule for p and p′ at (a + ib) / 2^BITS, each scaled by its own power of 2^BITS.
        p, q, slope_p, slope_q = polynomial[0], 0, 0, 0
        for k, c in enumerate(polynomial[1:], start=1):
            slope_p, slope_q = slope_p * a - slope_q * b + p, slope_p * b + slope_q * a + q
            p, q = p * a - q * b + (c << (BITS * k)), p * b + q * a
        norm = slope_p * slope_p + slope_q * slope_q
        if norm == 0:
            return None
        da, db = (p * slope_p + q * slope_q) // norm, (q * slope_p - p * slope_q) // norm
        a, b = a - da, b - db
        if max(abs(da), abs(db)) < 1 << CONVERGED_BITS:
            return a, b
    return None


def _derivative(p: Polynomial) -> Polynomial:
    return [c * (len(p) - 1 - k) for k, c in enumerate(p[:-1])]


def _primitive(p: Polynomial) -> Polynomial:
    """Return p without leading zeros, divided by the greatest common divisor of its coefficients."""
    start = next((k for k, c in enumerate(p) if c), len(p))
    content = gcd(*p) or 1
    return [c // content for c in p[start:]]


def _divide(p: Polynomial, q: Polynomial) -> tuple[Polynomial, Polynomial]:
    """Return quotient and remainder of p divided by q, multiplied by one integer so that all coefficients are whole."""
    quotient: Polynomial = []
    rest = [c * q[0] ** (len(p) - len(q) + 1) for c in p]
    while len(rest) >= len(q):
        factor = rest[0] // q[0]
        quotient.append(factor)
        rest = [c - (factor * q[k] if k < len(q) else 0) for k, c in enumerate(rest)][1:]
    return quotient, rest
