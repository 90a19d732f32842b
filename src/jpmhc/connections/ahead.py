"""Reading ahead: one layer's last write and the next layer's first read as one pass over the streams.

What was read ahead is kept with the streams it was read from, and used only if the next layer is given the very same.
"""

from typing import Any

import torch
from torch import Tensor, nn

ReadAhead = tuple[Tensor, int, bool, Any]  # the streams, their version, whether gradients were on, what was read


def may_read_ahead(owner: nn.Module, x: Tensor) -> bool:
    """Say whether the next layer's connection may read these streams before that layer is called.

    It may not where a compiler, another process, device or recomputation has a say in when that layer runs and its
    parameters are there.

    Args:
        owner: The module whose parameters the connection uses.
        x: The streams.
    """
    return not (
        torch.compiler.is_compiling()
        or x.is_inference()
        or (torch.distributed.is_available() and torch.distributed.is_initialized())
        or _may_be_recomputed()
        or next(owner.parameters()).device != x.device
    )


def _may_be_recomputed() -> bool:
    return torch._C._autograd._top_saved_tensors_default_hooks(False) is not None


def keep_read(x: Tensor, read: Any) -> ReadAhead:
    """Return what was read, with the streams it was read from."""
    return x, x._version, torch.is_grad_enabled(), read


def use_read(kept: ReadAhead | None, x: Tensor) -> Any:
    """Return what was read ahead, if it was read from these streams as they are now; else None.

    A layer that is recomputed reads for itself: what was read before it began is not there when it runs again.
    """
    if kept is None or torch.compiler.is_compiling() or _may_be_recomputed():
        return None
    streams, version, differentiable, read = kept
    fits = streams is x and version == x._version and (differentiable or not torch.is_grad_enabled())
    return read if fits else None
