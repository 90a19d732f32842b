"""Hyper-connections fused into few passes over the streams, in Triton: see docs/derivations/kernels.md.

Each pass has a file: `read`, `write`, `write_read` and, for few tokens without gradients, `decode`. The file contains
the kernels with their formulas, the steps that launch them, and the `Pass` that `jpmhc.connections.fused` calls. The
kernels contain the gates and norms, but no mixer: a mixer's Triton functions come with its `TritonForm`.
All files but `spec` need Triton.
"""

from jpmhc.kernels.spec import Spec, make_spec

__all__ = ["Spec", "make_spec"]
