"""The Cauchy transform of a network's squared singular values, by the exact equation of all its layers."""

from dataclasses import replace
from functools import partial
from typing import Protocol, TypedDict, Unpack

import torch
from torch import Tensor

from jpmhc.checks import choice, to_positive_number, to_whole_number
from jpmhc.machine import one_thread, ran_out_of_memory
from jpmhc.spectra.arguments import check_points
from jpmhc.spectra.chain import solve as chain
from jpmhc.spectra.chain import tied
from jpmhc.spectra.chain.fixed_point import SCHEMES, Scheme
from jpmhc.spectra.network import Network, require_network
from jpmhc.spectra.solution import Solution


class Options(TypedDict, total=False):
    """The options of a solver; it has a default for each."""

    tolerance: float
    maximum: int
    scheme: Scheme


class Solver(Protocol):
    """A function that solves a network's equation at checked points z [B] of the upper half-plane."""

    def __call__(self, network: Network, z: Tensor, **options: Unpack[Options]) -> Solution: ...


class Transform(Protocol):
    """A function that computes a network's Cauchy transform, as `cauchy` does."""

    def __call__(
        self,
        network: Network,
        z: Tensor,
        *,
        tolerance: float | None = None,
        maximum: int | None = None,
        near: Solution | None = None,
    ) -> Solution: ...


def cauchy(
    network: Network,
    z: Tensor,
    *,
    tolerance: float | None = None,
    maximum: int | None = None,
    scheme: str | Scheme | None = None,
    near: Solution | None = None,
    matrix: bool = False,
) -> Solution:
    r"""Compute the Cauchy transform $G(z)$ of $J^\top J$ at points of the upper half-plane.

    The result marks the points that did not converge.

    Args:
        network: Any network.
        z: The points, of any shape.
        tolerance: A point has converged when its residual is below this number; None takes the solver's default.
        maximum: The largest number of iterations per point; None takes the solver's default.
        scheme: How to iterate: a name in `SCHEMES`, or an object such as `Anderson(history=10)`.
        near: An earlier solution of the same network. Each point starts from the nearest point there.
        matrix: Whether to compute the matrix-valued transform too. It needs layers with weights of their own.
    """
    require_network(network)
    options = to_options(tolerance, maximum, scheme)
    if network.tied is not None and not matrix:
        return solve_points(tied.solve, network, z, options)
    known = near.known if near is not None and near.method == "chain" else None
    return solve_points(partial(chain.solve, known=known, matrix=matrix), network, z, options)


def to_options(tolerance: float | None, maximum: int | None, scheme: str | Scheme | None) -> Options:
    """Return the options that are given, checked."""
    options = Options()
    if tolerance is not None:
        options["tolerance"] = to_positive_number(tolerance, "the tolerance")
    if maximum is not None:
        options["maximum"] = to_whole_number(maximum, "the number of iterations")
    if isinstance(scheme, str):
        choice(scheme, SCHEMES, "scheme")
        scheme = SCHEMES[scheme]
    if scheme is not None:
        options["scheme"] = scheme
    return options


def solve_points(solver: Solver, network: Network, z: Tensor, options: Options) -> Solution:
    """Check points of any shape, solve at them, and return a solution of the same shape."""
    points = check_points(z, network.skips.device)
    with torch.no_grad(), one_thread():
        found = _solve_in_parts(solver, network, points.reshape(-1), options)
    return replace(
        found,
        G=found.G.reshape(points.shape),
        converged=found.converged.reshape(points.shape),
        residual=found.residual.reshape(points.shape),
        iterations=found.iterations.reshape(points.shape),
        hardest_layer=None if found.hardest_layer is None else found.hardest_layer.reshape(points.shape),
        matrix=None if found.matrix is None else found.matrix.reshape(*points.shape, *found.matrix.shape[1:]),
    )


def _solve_in_parts(solver: Solver, network: Network, z: Tensor, options: Options) -> Solution:
    """Solve at points z [B]; where memory runs out, solve the two halves one after the other (appendix "GPU")."""
    try:
        return solver(network, z, **options)
    except RuntimeError as error:
        if len(z) == 1 or not ran_out_of_memory(error):
            raise
    # Outside the handler, whose traceback would keep alive what filled the memory.
    return Solution.concatenate([_solve_in_parts(solver, network, part, options) for part in z.chunk(2)])
