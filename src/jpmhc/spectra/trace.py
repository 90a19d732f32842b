r"""Traces and spectra of operators that are given by products with vectors (appendix "Stochastic Trace Estimation").

An operator is a function of rows: it maps a block of k vectors [k, N] to the block of their images. `quadrature` and
`singular_quadrature` estimate the whole spectral measure from a few dozen products, and thereby
$\frac1N \mathrm{Tr}\, f(A)$ for every $f$, for example the Cauchy transform at all spectral points.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from jpmhc import checks

Operator = Callable[[Tensor], Tensor]

PROBES = ("gaussian", "rademacher")


@dataclass(frozen=True, eq=False)
class Estimate:
    """An estimated number and the estimate's standard error (NaN with fewer than two probes)."""

    value: Tensor
    error: float


def probes(
    count: int,
    size: int,
    kind: str = "gaussian",
    *,
    dtype: torch.dtype = torch.float64,
    device: torch.device | str = "cpu",
    generator: torch.Generator | None = None,
) -> Tensor:
    r"""Draw random vectors g of unit norm with $E[g g^*] = I/N$ and N = `size` entries each. [count, size]

    Args:
        kind: "gaussian" or "rademacher", the law of the entries before each vector is scaled to unit norm.

    Note:
        For the paper's complex Gaussian vectors one must use $g^*$: the expectation of $g^\top A g$ is zero.
    """
    count, size = checks.whole_number(count, "the number of probes"), checks.whole_number(size, "the size of a probe")
    checks.choice(kind, PROBES, "kind of probe")
    vectors = torch.randn(count, size, dtype=dtype, device=device, generator=generator)
    if kind == "rademacher":
        vectors = torch.sgn(vectors)  # phases, where the entries are complex
    return vectors / torch.linalg.vector_norm(vectors, dim=-1, keepdim=True)


def hutchinson(operator: Operator, start: Tensor) -> Estimate:
    r"""Estimate $\mathrm{Tr}\, A \approx \frac{N}{s} \sum_i g_i^* A g_i$ with s unit vectors $g_i$ and s products.

    Args:
        operator: $A$, on rows.
        start: The vectors $g_i$, as `probes` returns them. [s, N]
    """
    _check_probes(start)
    return _estimate(start.shape[-1] * _inner(start, operator(start)))


def hutchpp(operator: Operator, sketch: Tensor, start: Tensor) -> Estimate:
    r"""Estimate $\mathrm{Tr}\, A$ by Hutch++ (eq. hutchpp): exactly on a subspace, and by `hutchinson` on the rest.

    The estimate $\mathrm{Tr}(Q^* A Q) + \frac{N}{s} \sum_i g_i^* (1 - QQ^*) A (1 - QQ^*) g_i$ takes two products per
    sketch vector and one per probe. Its error is below the error of `hutchinson` with as many products if a few
    directions carry most of A. For the Jacobian of a network near isometry, whose singular values are all about one,
    the error is not smaller.

    Args:
        operator: $A$, on rows.
        sketch: Random vectors. The orthonormal columns of Q span the vectors' images under A. [k, N]
        start: The vectors $g_i$, drawn independently of the sketch. [s, N]
    """
    _check_probes(start)
    size = start.shape[-1]
    if sketch.shape[-1] != size or len(sketch) > size:
        raise ValueError(f"a sketch must be at most {size} vectors of size {size}, not of shape {list(sketch.shape)}")
    basis = torch.linalg.qr(operator(sketch).mT)[0].mT  # rows are the columns of Q. [k, N]
    head = _inner(basis, operator(basis)).sum()
    rest = start - (start @ basis.mH) @ basis
    tail = _estimate(size * _inner(rest, operator(rest)))
    return Estimate(head + tail.value, tail.error)  # eq. hutchpp


@dataclass(frozen=True, eq=False)
class Quadrature:
    r"""Nodes and weights of the spectral measures of s vectors, whose mean estimates the operator's spectral measure.

    Attributes:
        nodes: Eigenvalues, or squared singular values from `singular_quadrature`. [s, steps]
        weights: The mass at each node; each row sums to one. [s, steps]
    """

    nodes: Tensor
    weights: Tensor

    def mean(self, function: Callable[[Tensor], Tensor]) -> Estimate:
        r"""Estimate $\frac1N \mathrm{Tr}\, f(A)$ of the N × N operator A for a function f of eigenvalues."""
        return _estimate((self.weights * function(self.nodes)).sum(-1))

    def cauchy(self, z: Tensor) -> Tensor:
        r"""Estimate the Cauchy transform $\frac1N \mathrm{Tr}\,(z - A)^{-1}$ of the operator A at complex points z."""
        z = torch.as_tensor(z, dtype=torch.complex128, device=self.nodes.device)
        return (self.weights / (z[..., None, None] - self.nodes)).sum(-1).mean(-1)

    def moment(self, order: int) -> Estimate:
        r"""Estimate the moment $\frac1N \mathrm{Tr}\, A^k$ of the operator A, for k = `order`."""
        order = checks.whole_number(order, "the order of a moment", 0)
        return self.mean(lambda x: x**order)

    def below(self, threshold: float) -> Estimate:
        """Estimate the share of eigenvalues below a threshold; the nodes' distance limits the resolution."""
        return self.mean(lambda x: (x < threshold).to(self.weights.dtype))


def quadrature(operator: Operator, start: Tensor, steps: int) -> Quadrature:
    r"""Estimate the spectral measure of a Hermitian operator by stochastic Lanczos quadrature.

    After k steps each row of the result integrates every polynomial of degree below 2k exactly, for the spectral
    measure of the row's vector. The basis is stored and reorthogonalised, which takes memory for s · k · N numbers.

    Args:
        operator: A Hermitian $A$, on rows.
        start: Unit vectors, as `probes` returns them. [s, N]
        steps: The number k of Lanczos steps, with one product per vector each.
    """
    _check_steps(steps, start)
    basis = [start]
    diagonal, off = [], []
    for _ in range(steps):
        image = operator(basis[-1])
        diagonal.append(_inner(basis[-1], image).real)
        norm, vector = _next(image, basis)
        off.append(norm)
        basis.append(vector)
    alpha, beta = torch.stack(diagonal, -1), torch.stack(off[:-1], -1) if steps > 1 else start.real[:, :0]
    matrix = torch.diag_embed(alpha) + torch.diag_embed(beta, 1) + torch.diag_embed(beta, -1)
    nodes, vectors = torch.linalg.eigh(matrix)
    return Quadrature(nodes, vectors[:, 0, :].square())


def singular_quadrature(operator: Operator, adjoint: Operator, start: Tensor, steps: int) -> Quadrature:
    r"""Estimate the squared singular values of an operator $J$ from products with $J$ and $J^*$ (Golub–Kahan).

    Bidiagonalisation from each vector gives a matrix $B$ such that $B^\top B$ is the vector's Lanczos matrix of $J^*
    J$. Bidiagonalisation does not square the condition number: small singular values are resolved as well as large
    ones.

    Args:
        operator: $J$, on rows: [s, N] -> [s, M].
        adjoint: $J^*$, on rows: [s, M] -> [s, N]. For a network, a vector-Jacobian product.
        start: Unit vectors of the input space. [s, N]
        steps: The number of steps k: k products with J and k - 1 products with its adjoint per vector.
    """
    _check_steps(steps, start)
    right: list[Tensor] = [start]
    left: list[Tensor] = []
    diagonal: list[Tensor] = []
    off: list[Tensor] = []
    for step in range(steps):
        image = operator(right[-1])
        if step > 0:
            image = image - off[-1].unsqueeze(-1) * left[-1]
        norm, vector = _next(image, left)
        diagonal.append(norm)
        left.append(vector)
        if step + 1 < steps:
            back = adjoint(vector) - norm.unsqueeze(-1) * right[-1]
            norm, vector = _next(back, right)
            off.append(norm)
            right.append(vector)
    alpha = torch.stack(diagonal, -1)
    beta = torch.stack(off, -1) if off else alpha[:, :0]
    _, values, vectors = torch.linalg.svd(torch.diag_embed(alpha) + torch.diag_embed(beta, 1))
    return Quadrature(values.square(), vectors[:, :, 0].square())


def _next(image: Tensor, basis: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Return the length [s] and the direction [s, N] of the part of each image that is orthogonal to the basis.

    The direction is zero if there is no such part.
    """
    size = torch.linalg.vector_norm(image, dim=-1)
    if basis:
        known = torch.stack(basis, 1)  # [s, j, N]
        for _ in range(2):  # twice is enough for orthogonality to rounding
            image = image - ((known.conj() @ image.unsqueeze(-1)).mT @ known).squeeze(1)
    norm = torch.linalg.vector_norm(image, dim=-1)
    new = norm > 1e-13 * size
    norm = torch.where(new, norm, 0.0)
    return norm, torch.where(new.unsqueeze(-1), image / torch.where(new, norm, 1.0).unsqueeze(-1), 0.0)


def _inner(a: Tensor, b: Tensor) -> Tensor:
    return (a.conj() * b).sum(-1)


def _estimate(values: Tensor) -> Estimate:
    count = len(values)
    if count < 2:
        return Estimate(values.mean(), float("nan"))
    return Estimate(values.mean(), float((values - values.mean()).abs().square().sum() / (count - 1) / count) ** 0.5)


def _check_probes(start: Tensor) -> None:
    if start.ndim != 2 or not len(start):
        raise ValueError(f"probes must be rows [s, N], at least one, not of shape {list(start.shape)}")


def _check_steps(steps: int, start: Tensor) -> None:
    _check_probes(start)
    size = start.shape[-1]
    if checks.whole_number(steps, "the number of steps") > size:
        raise ValueError(f"the number of steps must be at most {size}, the dimension, not {steps}")
