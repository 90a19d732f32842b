"""Choose a method and call it: the table of "Solver Selection", with the chain for every network it leaves open."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from jpmhc.checks import choice, to_positive_number, to_whole_number
from jpmhc.spectra.memory import ran_out_of_memory
from jpmhc.spectra.network import Network, require_network
from jpmhc.spectra.solution import Solution, check_points
from jpmhc.spectra.solvers import METHODS, Solver
from jpmhc.spectra.solvers.fixed_point import SCHEMES, Scheme
from jpmhc.threads import one_thread


def cauchy(
    network: Network,
    z: Tensor,
    method: str = "auto",
    *,
    tolerance: float | None = None,
    maximum: int | None = None,
    scheme: str | Scheme | None = None,
    near: Solution | None = None,
    matrix: bool = False,
) -> Solution:
    r"""Compute the Cauchy transform $G(z)$ of $J^\top J$ at points of the upper half-plane, of any shape.

    A method that is defined for the network but not exact answers with `exact=False` and a warning that names the case;
    one that is not defined raises a ValueError. Points that did not converge are marked in the result.

    Args:
        network: The network whose Jacobian is asked about.
        z: The points.
        method: A name in `METHODS`, or "auto" for `choose`.
        tolerance: What a point's residual must fall below; the method's own default if None.
        maximum: The most iterations per point; the method's own default if None.
        scheme: How the method iterates: a name in `SCHEMES` or an object such as `Anderson(history=10)`; the method's
            own default if None.
        near: An earlier solution of the same network by the same method: the method "chain" starts each point from the
            nearest one there.
        matrix: Whether to compute the matrix-valued transform too, which the method "chain" can.
    """
    require_network(network)
    points = check_points(z, network.skips.device)
    choice(method, ["auto", *METHODS], "method")
    if matrix:
        choice(method, ["auto", "chain"], "method with a matrix-valued transform")
        method = "chain"
    options: dict[str, Any] = {}
    if tolerance is not None:
        options["tolerance"] = to_positive_number(tolerance, "the tolerance")
    if maximum is not None:
        options["maximum"] = to_whole_number(maximum, "the number of iterations")
    if isinstance(scheme, str):
        choice(scheme, SCHEMES, "scheme")
    if scheme is not None:
        options["scheme"] = SCHEMES[scheme] if isinstance(scheme, str) else scheme
    if matrix:
        options["matrix"] = True
    if method == "auto":
        method = choose(network)
    if near is not None and near.known is not None and near.method == method:
        options["known"] = near.known
    with torch.no_grad(), one_thread():
        found = _solve_in_parts(METHODS[method], network, points.reshape(-1), options)
    return replace(
        found,
        G=found.G.reshape(points.shape),
        converged=found.converged.reshape(points.shape),
        residual=found.residual.reshape(points.shape),
        iterations=found.iterations.reshape(points.shape),
        hardest_layer=None if found.hardest_layer is None else found.hardest_layer.reshape(points.shape),
        matrix=None if found.matrix is None else found.matrix.reshape(*points.shape, *found.matrix.shape[1:]),
    )


def _solve_in_parts(solver: Solver, network: Network, z: Tensor, options: dict[str, Any]) -> Solution:
    """Solve at points z [B]; where memory runs out, at one half of them after the other (appendix "GPU")."""
    try:
        return solver(network, z, **options)
    except RuntimeError as error:
        if len(z) == 1 or not ran_out_of_memory(error):
            raise
    # Outside the handler, whose traceback would keep alive what filled the memory.
    return Solution.concatenate([_solve_in_parts(solver, network, part, options) for part in z.chunk(2)])


def choose(network: Network) -> str:
    """Name the exact method for a network (appendix "Solver Selection").

    Note:
        For several streams and layers the paper composes S-transforms, which is not exact; the chain is. Structured
        noise, which the paper does not treat, is the chain's for any depth.
    """
    if network.tied is not None:
        return "pencil"
    if not (network.isotropic and network.gaussian_streams):
        return "chain"
    if network.depth == 1:
        return "dyson"
    if network.streams > 1 or network.is_zero:
        return "chain"
    return "z1" if network.identical else "subordination"
