"""Hyper-connections fused into few passes over the streams, in Triton: see docs/derivations/kernels.md.

The steps (`read`, `write`, `write_read`) are in `jpmhc.kernels.connection`, which needs Triton; the description of a
connection (`Spec`) does not.
"""

from typing import Any

from jpmhc.kernels.spec import Spec

_STEPS = ("State", "read", "uncovered", "write", "write_read")


def __getattr__(name: str) -> Any:
    if name not in _STEPS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from jpmhc.kernels import connection

    return getattr(connection, name)


__all__ = ["Spec", "State", "read", "uncovered", "write", "write_read"]
