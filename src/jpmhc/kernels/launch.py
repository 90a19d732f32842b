"""Launch kernels with little work on the host, and choose the sizes of their blocks and buffers."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from threading import get_ident, local
from typing import Any

import torch
import triton
from torch import Tensor
from triton.compiler import CompiledKernel

from jpmhc.kernels.driver import DirectLaunch, can_launch_directly
from jpmhc.kernels.spec import Spec

# For kernels that take any number T of tokens, so that a last, smaller batch needs no new compilation.
kernel = functools.partial(triton.jit, do_not_specialize=["T"])

SHARED_BYTES = 160 * 1024  # shared memory for a kernel's tiles, of a block's 227 KB on Hopper; the rest is scratch


class _Interception(local):
    """Each thread's function, if any, that is called with launcher, grid and arguments instead of a launch."""

    on_launch: Callable[[Launcher, tuple[int, ...], tuple[Any, ...]], None] | None = None


interception = _Interception()


class Launcher:
    """A kernel with its compile-time constants, for repeated launches.

    The first launch on a device compiles the kernel through Triton. Later launches call CUDA's driver directly, because
    Triton would determine at every launch which compilation the arguments belong to.

    Args:
        constants: The kernel's compile-time constants by name, and Triton's options (`num_warps`, …). Everything that
            affects the compilation must be a constant or the same in all launches. So the caller keeps one launcher per
            type of the streams, and passes tensors that start at multiples of 16 bytes (`aligned`).
    """

    def __init__(self, jit: triton.JITFunction, **constants: Any) -> None:
        self.jit = jit
        self.constants = constants
        self.compiled: dict[int, CompiledKernel] = {}  # by device
        self.direct: dict[tuple[int, int], DirectLaunch] = {}  # by device and thread, which share no buffer

    def launch(self, grid: tuple[int, ...], *arguments: Any) -> None:
        """Run the kernel, or call the function that intercepts this thread's launches (replay.py records with it)."""
        on_launch = interception.on_launch
        if on_launch is None:
            self.run(grid, *arguments)
        else:
            on_launch(self, grid, arguments)

    def run(self, grid: tuple[int, ...], *arguments: Any) -> None:
        """Run the kernel on the current CUDA stream of the first argument's device."""
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
        # The first launch, or a thread without a CUDA context (Triton makes one), or an error (Triton explains it).
        self._launch_through_triton(device, grid, arguments)

    def _make_direct(self, device: int) -> DirectLaunch | None:
        """Make this thread's `DirectLaunch`. Return None if the kernel is not compiled yet, or needs Triton."""
        compiled = self.compiled.get(device)
        if compiled is None or not can_launch_directly(compiled):
            return None
        direct = self.direct[device, get_ident()] = DirectLaunch(compiled)
        return direct

    def _launch_through_triton(self, device: int, grid: tuple[int, ...], arguments: tuple[Any, ...]) -> None:
        tensors = [argument.tensor() if isinstance(argument, BufferPart) else argument for argument in arguments]
        # Triton launches on the current device, PyTorch on the tensors' device.
        with torch.cuda.device(device) if device >= 0 else contextlib.nullcontext():
            compiled = self.jit[grid](*tensors, **self.constants)
        if hasattr(compiled, "packed_metadata"):  # not in the interpreter
            self.compiled[device] = compiled


class BufferPart:
    """A part of a buffer that kernels use like a tensor, so that several tensors share one allocation."""

    __slots__ = ("address", "buffer", "extent")

    def __init__(self, buffer: Tensor, extent: Extent, address: int) -> None:
        self.buffer, self.extent, self.address = buffer, extent, address

    @property
    def dtype(self) -> torch.dtype:
        return self.extent[2]

    def get_device(self) -> int:
        return self.buffer.get_device()

    def tensor(self) -> Tensor:
        """Return the part as a tensor of one dimension."""
        start, size, dtype = self.extent
        return self.buffer[start : start + size].view(dtype)


Layout = tuple[tuple[int, torch.dtype], ...]  # the number of entries and their type, for each part of a buffer
Extent = tuple[int, int, torch.dtype]  # a part's first byte, its size in bytes, and the type of its numbers


def buffer_bytes(layout: Layout) -> int:
    """Return the size in bytes of a buffer whose parts each start at a multiple of 16 bytes."""
    return sum(-(-count * dtype.itemsize // 16) * 16 for count, dtype in layout)


@functools.lru_cache(maxsize=1024)
def _find_extents(layout: Layout) -> tuple[tuple[Extent, ...], int]:
    """Return each part's extent in the buffer, and the buffer's size in bytes."""
    extents = tuple(
        (buffer_bytes(layout[:k]), count * dtype.itemsize, dtype) for k, (count, dtype) in enumerate(layout)
    )
    return extents, buffer_bytes(layout)


def make_buffer(layout: Layout, like: Tensor) -> Tensor:
    """Return a new buffer with this layout, on the device of the tensor `like`."""
    return like.new_empty(_find_extents(layout)[1], dtype=torch.uint8)


def split_buffer(buffer: Tensor, layout: Layout) -> list[BufferPart]:
    """Return the parts of a buffer that has this layout."""
    address = buffer.data_ptr()
    return [BufferPart(buffer, extent, address + extent[0]) for extent in _find_extents(layout)[0]]


def count_tokens(x: Tensor, dim: int) -> int:
    """Return the number of tokens of streams [..., n or 1, d]."""
    return x.numel() // (x.shape[-2] * dim)


def aligned(tensor: Tensor) -> Tensor:
    """Return the tensor, copied unless it is contiguous and starts at a multiple of 16 bytes, as kernels expect."""
    tensor = tensor.contiguous()
    return tensor if tensor.data_ptr() % 16 == 0 else tensor.clone()


def ceil_div(a: int, b: int) -> int:
    """Divide two integers and round up."""
    return -(-a // b)


def power_of_two(number: int) -> int:
    """Return the smallest power of two that is at least `number`."""
    return 1 << (number - 1).bit_length()


ROW_ELEMENTS = 16  # numbers of one stream per thread: enough loads in flight, few enough registers


def row_launch(spec: Spec, whole: bool = True) -> dict[str, int]:
    """Return the block sizes and the number of warps for a kernel that handles streams row by row.

    One program handles one token. Each warp handles up to 512 columns, so that sums over a short row never leave their
    warp. A longer row is divided among several warps if the kernel needs the `whole` row at once; otherwise a block is
    a slice of the row.
    """
    width = power_of_two(spec.d)
    if not whole:
        width = min(width, 32 * ROW_ELEMENTS)
    return {"BT": 1, "BD": width, "num_warps": max(1, width // (32 * ROW_ELEMENTS))}


def precision(operand: torch.dtype) -> str:
    """Return Triton's `input_precision` for operands of a type: a float32 product becomes three tf32 products."""
    return "tf32x3" if operand == torch.float32 else "tf32"


def stages(bytes_each: int, wanted: int, taken: int = 0) -> int:
    """Return the number of stages, from 1 to `wanted`, that fit into shared memory beside `taken` bytes.

    A pipeline stage needs `bytes_each` bytes.
    """
    return max(1, min(wanted, (SHARED_BYTES - taken) // bytes_each))


def padded(logits: int) -> int:
    """Return the number of logits padded for the tensor cores: a power of two, at least 16."""
    return max(16, power_of_two(logits))


@functools.cache
def multiprocessors(device: torch.device) -> int:
    """Return the number of multiprocessors of a CUDA device, and 2 for Triton's interpreter."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2
