"""Launch compiled kernels through CUDA's driver, with the arguments packed into one buffer.

Triton's launcher converts the arguments one by one from Python objects, which takes most of a small kernel's time on
the host. Here all arguments are packed at once into a buffer with the layout of the kernel's parameters, and one call
of the driver follows.
"""

import ctypes
import functools
import re
import struct
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from triton.compiler import CompiledKernel

_FORMATS = {"i32": "i", "i64": "q", "fp32": "f"}  # {Triton's type: `struct`'s format}; pointers are "P"


@functools.cache
def _driver() -> Callable[..., int]:
    launch = ctypes.CDLL("libcuda.so.1").cuLaunchKernel
    launch.argtypes = [ctypes.c_void_p, *[ctypes.c_uint] * 7, *[ctypes.c_void_p] * 3]
    return launch


class DirectLaunch:
    """A compiled kernel and a buffer for its arguments. One thread at a time may use it."""

    def __init__(self, compiled: "CompiledKernel") -> None:
        types = list(compiled.src.signature.values())
        # Triton compiles None, and 1 for some arguments, as constants.
        self.runtime_arguments = [k for k, kind in enumerate(types) if kind != "constexpr"]
        formats = ["P" if types[k].startswith("*") else _FORMATS[types[k]] for k in self.runtime_arguments]
        # At the end Triton adds pointers to scratch memory, which these kernels do not need.
        self.scratch_pointers = (0,) * (count_kernel_parameters(compiled.asm["ptx"]) - len(formats))
        self.layout = struct.Struct("@" + "".join(formats) + "P" * len(self.scratch_pointers))
        self.buffer = ctypes.create_string_buffer(self.layout.size)
        self.size = ctypes.c_size_t(self.layout.size)
        address, size = ctypes.addressof(self.buffer), ctypes.addressof(self.size)
        # CU_LAUNCH_PARAM_BUFFER_POINTER, CU_LAUNCH_PARAM_BUFFER_SIZE, CU_LAUNCH_PARAM_END
        self.extra = (ctypes.c_void_p * 5)(1, address, 2, size, 0)
        self.threads, self.shared = 32 * compiled.metadata.num_warps, compiled.metadata.shared
        self.function, self.call = compiled.function, _driver()

    def select_arguments(self, arguments: list[Any]) -> list[Any]:
        """Return the arguments that the compiled kernel takes, which are all but its constants."""
        all_taken = len(arguments) == len(self.runtime_arguments)
        return arguments if all_taken else [arguments[k] for k in self.runtime_arguments]

    def launch(self, rows: int, columns: int, stream: int, arguments: list[int | None]) -> bool:
        """Run the kernel on `rows` × `columns` blocks. Return whether the driver accepted the launch."""
        self.layout.pack_into(self.buffer, 0, *self.select_arguments(arguments), *self.scratch_pointers)
        return not self.call(self.function, rows, columns, 1, self.threads, 1, 1, self.shared, stream, None, self.extra)


@functools.cache
def _extended_driver() -> Callable[..., int]:
    launch = ctypes.CDLL("libcuda.so.1").cuLaunchKernelEx
    launch.argtypes = [ctypes.c_void_p] * 4
    return launch


_CONFIG = struct.Struct("@7IPPI4x")  # CUlaunchConfig: grid, block, shared memory, stream, attributes and their number
_STREAM = 32  # the byte at which the stream starts in `_CONFIG`


class PackedLaunches:
    """A sequence of launches of compiled kernels with one list of pointers. One thread at a time may use it.

    Args:
        kernels: Triton's compiled kernels, in the order in which they run.
        grids: Each kernel's number of blocks, in one or two dimensions.
        arguments: Each kernel's arguments: `("slot", k)` is the k-th pointer, `("value", number or None)` a constant.
    """

    def __init__(
        self,
        kernels: "list[CompiledKernel]",
        grids: list[tuple[int, ...]],
        arguments: list[list[tuple[str, int | None]]],
        pointers: int,
    ) -> None:
        launches = [DirectLaunch(kernel) for kernel in kernels]
        selected = [one.select_arguments(given) for one, given in zip(launches, arguments)]
        constants = [value or 0 for given in selected for kind, value in given if kind == "value"]
        # Eight bytes for every value, little-endian: an int32 is the first half of its eight bytes.
        self.pointers = struct.Struct(f"@{pointers}Q")
        self.values = ctypes.create_string_buffer(8 * (pointers + len(constants) + 1))  # the last one is zero
        struct.pack_into(f"@{len(constants)}q", self.values, 8 * pointers, *constants)
        self.configs = ctypes.create_string_buffer(_CONFIG.size * len(kernels))
        first, last = ctypes.addressof(self.values), pointers + len(constants)
        used = pointers
        self.parameters, self.calls = [], []
        for number, (one, grid, given) in enumerate(zip(launches, grids, selected)):
            slots: list[int] = []
            for kind, value in given:
                slots.append(value if kind == "slot" else used)
                used += kind == "value"
            slots += [last] * len(one.scratch_pointers)
            self.parameters.append((ctypes.c_void_p * len(slots))(*(first + 8 * slot for slot in slots)))
            blocks = (*grid, 1, 1)[:3]
            _CONFIG.pack_into(self.configs, _CONFIG.size * number, *blocks, one.threads, 1, 1, one.shared, 0, 0, 0)
            config = ctypes.addressof(self.configs) + _CONFIG.size * number
            self.calls.append((config, one.function, ctypes.addressof(self.parameters[-1]), None))
        self.call, self.stream = _extended_driver(), 0

    def launch(self, pointers: Iterable[int], stream: int) -> bool:
        """Run all kernels on a CUDA stream. Return whether the driver accepted the launches."""
        if stream != self.stream:
            for number in range(len(self.calls)):
                struct.pack_into("@P", self.configs, _CONFIG.size * number + _STREAM, stream)
            self.stream = stream
        self.pointers.pack_into(self.values, 0, *pointers)
        call = self.call
        for number, given in enumerate(self.calls):
            error = call(*given)
            if error and number:
                raise RuntimeError(
                    f"CUDA's driver refused a kernel (error {error}) after it had taken others of the same step"
                )
            if error:
                return False
        return True


def count_kernel_parameters(ptx: str) -> int:
    """Return the number of parameters of the kernel in a PTX text."""
    head = re.search(r"\.entry\s+\w+\s*\((.*?)\)", ptx, re.DOTALL)
    return 0 if head is None else head.group(1).count(".param")


def can_launch_directly(compiled: "CompiledKernel") -> bool:
    """Return whether `DirectLaunch` can launch a compiled kernel: it must use no clusters and no scratch memory."""
    metadata = compiled.metadata
    extras = ("global_scratch_size", "profile_scratch_size", "launch_cooperative_grid", "launch_pdl")
    if "ptx" not in compiled.asm or any(getattr(metadata, name, 0) for name in extras) or metadata.num_ctas != 1:
        return False
    types = [kind for kind in compiled.src.signature.values() if kind != "constexpr"]
    known = all(kind.startswith("*") or kind in _FORMATS for kind in types)
    return known and count_kernel_parameters(compiled.asm["ptx"]) >= len(types)
