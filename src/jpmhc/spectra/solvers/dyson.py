"""The method `dyson`: one layer with isotropic noise, whose law one_layer.py computes."""

from torch import Tensor

from jpmhc.spectra.network import Network
from jpmhc.spectra.solution import Solution
from jpmhc.spectra.solvers.fixed_point import Newton, Scheme
from jpmhc.spectra.solvers.one_layer import gram_spectrum, layer_cauchy
from jpmhc.spectra.solvers.requirements import require_isotropic

_SCHEME = Newton()


def solve(
    network: Network,
    z: Tensor,
    *,
    tolerance: float = 1e-12,
    maximum: int = 200,
    scheme: Scheme = _SCHEME,
) -> Solution:
    """Solve a network of one layer with isotropic noise at points z [B].

    Args:
        network: One layer.
        z: Points of the upper half plane. [B]
        tolerance: Of the residual, relative to $|G|$.
        maximum: The most iterations in the second pass.
        scheme: How to iterate.
    """
    if network.depth != 1:
        raise ValueError(f"method 'dyson' solves one layer, and this network has {network.depth}; use 'chain'")
    require_isotropic(network, "dyson")
    spectrum, variance = gram_spectrum(network.skips[0]), float(network.variance[0])
    found = layer_cauchy(z, spectrum, variance, tolerance=tolerance, maximum=maximum, scheme=scheme)
    return Solution(found.x.squeeze(-1), found.converged, found.residual, found.iterations, "dyson")
