"""Choose a method and ask it: the table of "Solver Selection", with the chain for every network it leaves open."""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from jpmhc.checks import to_positive_number, to_whole_number
from jpmhc.spectra.network import Network, require_network
from jpmhc.spectra.solution import Solution, check_points
from jpmhc.spectra.solvers import chain, dyson, stransform, subordination, twisted, z1

METHODS: dict[str, Callable[..., Solution]] = {
    "chain": chain.solve,
    "dyson": dyson.solve,
    "z1": z1.solve,
    "subordination": subordination.solve,
    "stransform": stransform.solve,
    "twisted": twisted.solve,
}


def cauchy(
    network: Network,
    z: Tensor,
    method: str = "auto",
    *,
    tolerance: float | None = None,
    maximum: int | None = None,
) -> Solution:
    r"""The Cauchy transform $G(z)$ of $J^\top J$ at points of the upper half-plane, of any shape.

    A method that is defined for the network but not exact answers with `exact=False` and a warning that names the case;
    one that is not defined raises a ValueError. Points that did not converge are marked in the result.

    Args:
        method: A name in `METHODS`, or "auto" for `choose`.
        tolerance: What a point's residual must fall below; the method's own default by default.
        maximum: The most iterations per point; the method's own default by default.
    """
    require_network(network)
    points = check_points(z, network.skips.device)
    name = choose(network) if method == "auto" else method
    if not isinstance(name, str) or name not in METHODS:
        raise ValueError(f"no method is called {method!r}; choose one of auto, {', '.join(METHODS)}")
    options = {
        "tolerance": None if tolerance is None else to_positive_number(tolerance, "the tolerance"),
        "maximum": None if maximum is None else to_whole_number(maximum, "the number of iterations"),
    }
    with torch.no_grad():
        found = METHODS[name](network, points.reshape(-1), **{k: v for k, v in options.items() if v is not None})
    return replace(
        found,
        G=found.G.reshape(points.shape),
        converged=found.converged.reshape(points.shape),
        residual=found.residual.reshape(points.shape),
        iterations=found.iterations.reshape(points.shape),
    )


def choose(network: Network) -> str:
    """The exact method for a network (appendix "Solver Selection").

    Note:
        For several streams and layers the paper composes S-transforms, which is not exact; the chain is. Structured
        noise, which the paper does not treat, is the chain's for any depth.
    """
    if not network.isotropic:
        return "chain"
    if network.depth == 1:
        return "dyson"
    if network.streams > 1:
        return "chain"
    return "z1" if network.identical else "subordination"
