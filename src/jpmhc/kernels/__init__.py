"""Hyper-connections fused into few passes over the streams, in Triton: see docs/derivations/kernels.md."""

from jpmhc.kernels.connection import State, read, uncovered, write, write_read
from jpmhc.kernels.spec import Spec

__all__ = ["Spec", "State", "read", "uncovered", "write", "write_read"]
