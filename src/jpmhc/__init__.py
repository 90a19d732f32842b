"""Hyper-connections on manifolds, the Jacobian spectra they give, and the recursive model they were made for.

Names are imported when they are first used, so that `import jpmhc` and `jpmhc --help` are immediate. The library needs
torch and numpy; an extra names the packages that a part needs besides (see pyproject.toml).
"""

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"
__all__ = [
    "MIXERS",
    "HyperConnection",
    "HyperConnectionStack",
    "StreamExpansion",
    "StreamHead",
    "__version__",
    "accelerate",
    "connections",
    "diagnose",
    "dialects",
    "expand_streams",
    "experiments",
    "generators",
    "load_plain_weights",
    "load_wrapped",
    "manifolds",
    "mixers",
    "optim",
    "paper",
    "parallelize_connections",
    "parameter_groups",
    "prepare_stage",
    "recommend",
    "reduce_streams",
    "shard_connections",
    "spectra",
    "unwrap",
    "wrap",
]

# The sub-package that each public function, class and constant comes from; all other names are sub-packages.
_HOMES = {
    "generators": "paper",
    "MIXERS": "mixers",
    "HyperConnection": "connections",
    "HyperConnectionStack": "connections",
    "diagnose": "diagnose",
    "recommend": "diagnose",
    "StreamExpansion": "connections",
    "StreamHead": "connections",
    "accelerate": "dialects",
    "expand_streams": "connections",
    "load_plain_weights": "connections",
    "load_wrapped": "wrap",
    "parameter_groups": "connections",
    "reduce_streams": "connections",
    "parallelize_connections": "connections",
    "shard_connections": "connections",
    "prepare_stage": "wrap",
    "unwrap": "wrap",
    "wrap": "wrap",
}


class _Package(ModuleType):
    """The type of this module. It keeps a function such as `wrap` when the sub-package `jpmhc.wrap` is imported."""

    def __setattr__(self, name: str, value: Any) -> None:
        if isinstance(value, ModuleType) and _HOMES.get(name) == name:
            value = getattr(value, name)
        super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package

if TYPE_CHECKING:
    from jpmhc import connections, dialects, experiments, manifolds, mixers, optim, paper, spectra
    from jpmhc.connections import (
        HyperConnection,
        HyperConnectionStack,
        StreamExpansion,
        StreamHead,
        expand_streams,
        load_plain_weights,
        parallelize_connections,
        parameter_groups,
        reduce_streams,
        shard_connections,
    )
    from jpmhc.diagnose import diagnose
    from jpmhc.diagnose.recommend import recommend
    from jpmhc.dialects import accelerate
    from jpmhc.mixers import MIXERS
    from jpmhc.paper import generators
    from jpmhc.wrap import load_wrapped, prepare_stage, unwrap, wrap
else:

    def __getattr__(name: str) -> Any:
        if name not in __all__:
            raise AttributeError(f"module 'jpmhc' has no attribute {name!r}")
        module = import_module(f"jpmhc.{_HOMES.get(name, name)}")
        globals()[name] = getattr(module, name) if name in _HOMES else module
        return globals()[name]


def __dir__() -> list[str]:
    return __all__
