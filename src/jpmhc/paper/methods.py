"""The paper's methods for the Cauchy transform, by name; each method's file says when the method is not exact."""

from torch import Tensor

from jpmhc import checks
from jpmhc.paper import main_text, one_layer, stransform, subordination, twisted, z1
from jpmhc.spectra.fixed_point import Scheme
from jpmhc.spectra.network import Network
from jpmhc.spectra.solution import Method, Solution, Transform

METHODS: dict[str, Method] = {
    "dyson": one_layer.solve,
    "dyson-fp": main_text.solve_scalar,
    "matrix-dyson": main_text.solve_matrix,
    "z1": z1.solve,
    "z1-matrix": z1.solve_matrix_power,
    "subordination": subordination.solve,
    "stransform": stransform.solve,
    "twisted": twisted.solve,
    "twisted-paper": twisted.solve_as_printed,
}
# Methods whose values G(z) are not the transform of any law.
WITHOUT_DENSITY = {
    "dyson-fp": "eq. dyson-fp, G = m/z, has no density: it grows as 1/x towards zero, so that its mass is infinite; "
    "paper.cauchy computes its values, and method 'dyson' solves the equation that is right"
}


def cauchy(
    network: Network,
    z: Tensor,
    method: str,
    *,
    tolerance: float | None = None,
    maximum: int | None = None,
    scheme: str | Scheme | None = None,
) -> Solution:
    r"""Compute the Cauchy transform $G(z)$ of $J^\top J$ by one of the paper's methods.

    A method that is not exact for the network warns, and returns `exact=False` with the reason in `note`. A method that
    is not defined for the network raises a ValueError. `spectra.cauchy` is exact for every network.

    Args:
        z: Points of the upper half-plane, of any shape.
        method: A name in `METHODS`.
        tolerance: A point has converged when its residual is below this number; None takes the method's default.
        maximum: The largest number of iterations per point; None takes the method's default.
        scheme: The way to iterate: a name in `SCHEMES` or an object such as `Newton()`; None for the method's default.

    >>> import torch
    >>> network = Network.repeated(torch.eye(2), 0.1, 3)
    >>> solution = cauchy(network, torch.tensor([1 + 0.1j]), "z1")
    >>> solution.method, solution.exact
    ('z1', True)
    """
    checks.choice(method, METHODS, "method")
    return METHODS[method](network, z, tolerance=tolerance, maximum=maximum, scheme=scheme)


def transform(method: str) -> Transform:
    """Return the Cauchy transform by one of the paper's methods, as an argument of `spectra.density` or `edges`.

    >>> import torch
    >>> from jpmhc import spectra
    >>> network = Network.repeated(torch.eye(2), 0.1, 3)
    >>> curve = spectra.density(network, transform=transform("z1"))
    >>> curve.method, round(curve.mass, 2)
    ('z1', 1.0)
    """
    checks.choice(method, METHODS, "method")
    if method in WITHOUT_DENSITY:
        raise ValueError(WITHOUT_DENSITY[method])
    return METHODS[method]
