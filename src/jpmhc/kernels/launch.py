"""Facts that every launcher needs: the device's width and the padded sizes Triton wants."""

import functools

import torch
import triton
from torch import Tensor

# For kernels that take any number T of tokens: a last, smaller batch compiles nothing anew.
kernel = functools.partial(triton.jit, do_not_specialize=["T"])

SHARED_BYTES = 160 * 1024  # that a kernel may plan with, of the 227 KB a block has on Hopper; the rest is scratch


def stages(bytes_each: int, wanted: int, taken: int = 0) -> int:
    """How deep a loop may be pipelined when every stage holds that many bytes on chip, beside those `taken`."""
    return max(1, min(wanted, (SHARED_BYTES - taken) // bytes_each))


def padded(logits: int) -> int:
    """The number of logits as the tensor cores see it: a power of two, at least 16."""
    return max(16, triton.next_power_of_2(logits))


@functools.cache
def _multiprocessors(index: int) -> int:
    return torch.cuda.get_device_properties(index).multi_processor_count


def multiprocessors(tensor: Tensor) -> int:
    """How many blocks of a persistent kernel run at once; a small number where the interpreter runs them in turn."""
    return _multiprocessors(tensor.device.index) if tensor.is_cuda else 2
