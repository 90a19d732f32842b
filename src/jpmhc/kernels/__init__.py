"""Hyper-connections fused into few passes over the streams, in Triton: see docs/derivations/kernels.md.

The kernels know gates, norms and passes, and no mixer by name: a mixer's Triton functions come with its `TritonForm`.
`jpmhc.connections.fused` runs the steps (`read`, `write`, `write_read`) of autograd.py and operators.py, which need
Triton; `Spec` does not.
"""

from jpmhc.kernels.spec import Spec, make_spec

__all__ = ["Spec", "make_spec"]
