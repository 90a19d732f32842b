"""Hyper-connections on manifolds, the Jacobian spectra they give, and the recursive model they were made for."""

from jpmhc.connections import (
    MIXERS,
    HyperConnection,
    HyperConnectionStack,
    expand_streams,
    parameter_groups,
    reduce_streams,
)

__version__ = "0.1.0"
__all__ = [
    "MIXERS",
    "HyperConnection",
    "HyperConnectionStack",
    "__version__",
    "expand_streams",
    "parameter_groups",
    "reduce_streams",
]
