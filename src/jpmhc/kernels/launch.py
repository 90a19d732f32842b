"""Launching kernels with little work on the host, and the sizes that every launcher needs."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from threading import get_ident, local
from typing import Any

import torch
import triton
from torch import Tensor

from jpmhc.kernels.driver import DirectLaunch, can_launch_directly
from jpmhc.kernels.spec import Spec

# For kernels that take any number T of tokens: a last, smaller batch compiles nothing anew.
kernel = functools.partial(triton.jit, do_not_specialize=["T"])

SHARED_BYTES = 160 * 1024  # that a kernel may plan with, of the 227 KB a block has on Hopper; the rest is scratch


class _Interception(local):
    """The function that is called with launcher, grid and arguments instead of every launch of this thread, if any."""

    on_launch: Callable[[Launcher, tuple[int, ...], tuple[Any, ...]], None] | None = None


interception = _Interception()


class Launcher:
    """One kernel with its compile-time constants, launched again and again.

    The first launch on a device compiles through Triton. Later ones go straight to CUDA's driver: Triton would work out
    anew, for each of them, which compilation the arguments belong to.

    Args:
        jit: The kernel.
        constants: Its compile-time constants by name, and Triton's options (`num_warps`, …). Everything that decides
            about the compilation has to be in here or be the same in all launches: the caller keeps one launcher for
            each type of the streams, and hands over tensors that start at multiples of 16 bytes (`aligned`).
    """

    def __init__(self, jit: Any, **constants: Any) -> None:
        self.jit = jit
        self.constants = constants
        self.compiled: dict[int, Any] = {}  # by device
        self.direct: dict[tuple[int, int], DirectLaunch] = {}  # by device and thread: each has a buffer of its own

    def launch(self, grid: tuple[int, ...], *arguments: Any) -> None:
        """Run the kernel, or hand it to the function that intercepts this thread's launches."""
        on_launch = interception.on_launch
        if on_launch is None:
            self.run(grid, *arguments)
        else:
            on_launch(self, grid, arguments)

    def run(self, grid: tuple[int, ...], *arguments: Any) -> None:
        """Run the kernel on the current stream of the device that the first argument is on."""
        device = arguments[0].get_device()
        direct = self.direct.get((device, get_ident())) or self._make_direct(device)
        if direct is not None:
            plain = [
                a if a is None or a.__class__ is int else a.address if a.__class__ is BufferPart else a.data_ptr()
                for a in arguments
            ]
            rows, columns = grid if len(grid) == 2 else (grid[0], 1)
            if direct.launch(rows, columns, torch._C._cuda_getCurrentRawStream(device), plain):
                return
        # The first launch; or a thread without CUDA's context, which Triton makes; or Triton says what is wrong.
        self._launch_through_triton(device, grid, arguments)

    def _make_direct(self, device: int) -> DirectLaunch | None:
        """Make what this thread launches with, once the kernel is compiled."""
        compiled = self.compiled.get(device)
        if compiled is None or not can_launch_directly(compiled):
            return None
        direct = self.direct[device, get_ident()] = DirectLaunch(compiled)
        return direct

    def _launch_through_triton(self, device: int, grid: tuple[int, ...], arguments: tuple[Any, ...]) -> None:
        tensors = [argument.tensor() if isinstance(argument, BufferPart) else argument for argument in arguments]
        # Triton launches on the current device, PyTorch on that of the tensors.
        with torch.cuda.device(device) if device >= 0 else contextlib.nullcontext():
            compiled = self.jit[grid](*tensors, **self.constants)
        if hasattr(compiled, "packed_metadata"):  # not in the interpreter
            self.compiled[device] = compiled


class BufferPart:
    """A part of one buffer that kernels see as a tensor of its own: one allocation on the host instead of many."""

    __slots__ = ("address", "buffer", "place")

    def __init__(self, buffer: Tensor, place: Place, address: int) -> None:
        self.buffer, self.place, self.address = buffer, place, address

    @property
    def dtype(self) -> torch.dtype:
        return self.place[2]

    def get_device(self) -> int:
        return self.buffer.get_device()

    def tensor(self) -> Tensor:
        """Return the part as a tensor of one dimension."""
        start, size, dtype = self.place
        return self.buffer[start : start + size].view(dtype)


Layout = tuple[tuple[int, torch.dtype], ...]  # how many numbers, and of which type, the parts of a buffer hold
Place = tuple[int, int, torch.dtype]  # where a part starts, how many bytes it has, and the type of its numbers


def buffer_bytes(layout: Layout) -> int:
    """Return the size of a buffer whose parts each start at a multiple of 16 bytes."""
    return sum(-(-count * dtype.itemsize // 16) * 16 for count, dtype in layout)


@functools.lru_cache(maxsize=1024)
def _find_places(layout: Layout) -> tuple[tuple[Place, ...], int]:
    """Return where the parts lie, and the size of the whole."""
    places = tuple((buffer_bytes(layout[:k]), count * dtype.itemsize, dtype) for k, (count, dtype) in enumerate(layout))
    return places, buffer_bytes(layout)


def make_buffer(layout: Layout, like: Tensor) -> Tensor:
    """Allocate a buffer for these parts where the tensor is."""
    return like.new_empty(_find_places(layout)[1], dtype=torch.uint8)


def split_buffer(buffer: Tensor, layout: Layout) -> list[BufferPart]:
    """Return the parts of a buffer that was made for this layout."""
    address = buffer.data_ptr()
    return [BufferPart(buffer, place, address + place[0]) for place in _find_places(layout)[0]]


def count_tokens(x: Tensor, dim: int) -> int:
    """Return the number of tokens of streams [..., n or 1, d]."""
    return x.numel() // (x.shape[-2] * dim)


def aligned(tensor: Tensor) -> Tensor:
    """Return the tensor in one piece that starts at a multiple of 16 bytes, as the compiled kernels expect."""
    tensor = tensor.contiguous()
    return tensor if tensor.data_ptr() % 16 == 0 else tensor.clone()


def ceil_div(a: int, b: int) -> int:
    """Divide and round up, in plain integers."""
    return -(-a // b)


def power_of_two(number: int) -> int:
    """Return the smallest power of two that is not below the number."""
    return 1 << (number - 1).bit_length()


ROW_ELEMENTS = 16  # of one stream that a thread holds: enough loads in flight, few enough registers


def row_launch(spec: Spec, whole: bool = True) -> dict[str, int]:
    """Return blocks and warps for a kernel that takes streams row by row.

    One program handles one token. Each warp handles up to 512 columns, so that sums over a short row never leave their
    warp. A longer row is shared among several warps, if it is needed as a whole.
    """
    width = power_of_two(spec.d)
    if not whole:
        width = min(width, 32 * ROW_ELEMENTS)
    return {"BT": 1, "BD": width, "num_warps": max(1, width // (32 * ROW_ELEMENTS))}


def precision(operand: torch.dtype) -> str:
    """Return how the tensor cores multiply: half types exactly, float32 as three products of tf32."""
    return "tf32x3" if operand == torch.float32 else "tf32"


def stages(bytes_each: int, wanted: int, taken: int = 0) -> int:
    """Return how deep a loop may be pipelined when every stage holds that many bytes on chip, beside those `taken`."""
    return max(1, min(wanted, (SHARED_BYTES - taken) // bytes_each))


def padded(logits: int) -> int:
    """Return the number of logits as the tensor cores see it: a power of two, at least 16."""
    return max(16, power_of_two(logits))


@functools.cache
def _multiprocessors(index: int) -> int:
    return torch.cuda.get_device_properties(index).multi_processor_count


def multiprocessors(tensor: Tensor) -> int:
    """Return how many blocks of a kernel run at once; a small number where the interpreter runs them in turn."""
    return _multiprocessors(tensor.device.index) if tensor.is_cuda else 2
