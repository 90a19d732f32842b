"""How to tell that memory ran out, on a GPU or on the host."""

import torch

# What PyTorch's allocators on the host say, which raise a plain RuntimeError.
_HOST = ("can't allocate memory", "not enough memory")


def ran_out_of_memory(error: RuntimeError) -> bool:
    """Return whether an error says that memory ran out."""
    return isinstance(error, torch.OutOfMemoryError) or any(words in str(error) for words in _HOST)
