"""Hyper-connections fused into few passes over the streams, in Triton: see docs/derivations/kernels.md.

One file is one pass: `read`, `write`, `write_read` and, for few tokens without gradients, `decode`. Each file holds its
kernels with their formulas, the steps that launch them, and the pass as `jpmhc.connections.fused` calls it (`Pass`).
The kernels know gates, norms and passes, and no mixer by name: a mixer's Triton functions come with its `TritonForm`.
All files but `spec` need Triton.
"""

from jpmhc.kernels.spec import Spec, make_spec

__all__ = ["Spec", "make_spec"]
