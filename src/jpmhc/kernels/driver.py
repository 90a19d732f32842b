"""Launching a compiled kernel through CUDA's driver, with its arguments packed into one buffer.

Triton's launcher takes the arguments apart one by one in Python objects and takes most of a small kernel's time on the
host. Here they go as they are into a buffer laid out as the kernel's parameters, and one call of the driver follows.
"""

import ctypes
import functools
import re
import struct
from collections.abc import Callable
from typing import Any

_FORMATS = {"i32": "i", "i64": "q", "fp32": "f"}  # of `struct`, by Triton's names of types; pointers are "P"


@functools.cache
def _driver() -> Callable[..., int]:
    launch = ctypes.CDLL("libcuda.so.1").cuLaunchKernel
    launch.argtypes = [ctypes.c_void_p, *[ctypes.c_uint] * 7, *[ctypes.c_void_p] * 3]
    return launch


class DirectLaunch:
    """A compiled kernel and a buffer for its arguments. One thread at a time may use it.

    Args:
        compiled: Triton's compiled kernel.
    """

    def __init__(self, compiled: Any) -> None:
        types = list(compiled.src.signature.values())
        self.taken = [k for k, kind in enumerate(types) if kind != "constexpr"]  # None and some ones are constants
        formats = ["P" if types[k].startswith("*") else _FORMATS[types[k]] for k in self.taken]
        # Triton adds pointers to memory for its own use at the end, which these kernels do not ask for.
        self.own = (0,) * (count_kernel_parameters(compiled.asm["ptx"]) - len(formats))
        self.layout = struct.Struct("@" + "".join(formats) + "P" * len(self.own))
        self.buffer = ctypes.create_string_buffer(self.layout.size)
        self.size = ctypes.c_size_t(self.layout.size)
        address, size = ctypes.addressof(self.buffer), ctypes.addressof(self.size)
        # CU_LAUNCH_PARAM_BUFFER_POINTER, CU_LAUNCH_PARAM_BUFFER_SIZE, CU_LAUNCH_PARAM_END
        self.extra = (ctypes.c_void_p * 5)(1, address, 2, size, 0)
        self.threads, self.shared = 32 * compiled.metadata.num_warps, compiled.metadata.shared
        self.function, self.call = compiled.function, _driver()

    def launch(self, rows: int, columns: int, stream: int, arguments: list[int | None]) -> bool:
        """Run the kernel on `rows` × `columns` blocks. Return whether the driver took it."""
        if len(arguments) > len(self.taken):
            arguments = [arguments[k] for k in self.taken]
        self.layout.pack_into(self.buffer, 0, *arguments, *self.own)
        return not self.call(self.function, rows, columns, 1, self.threads, 1, 1, self.shared, stream, None, self.extra)


def count_kernel_parameters(ptx: str) -> int:
    """Return how many parameters the kernel of a PTX text has."""
    head = re.search(r"\.entry\s+\w+\s*\((.*?)\)", ptx, re.DOTALL)
    return 0 if head is None else head.group(1).count(".param")


def can_launch_directly(compiled: Any) -> bool:
    """Say whether `DirectLaunch` gives a compiled kernel all that it asks for: no clusters, no memory of its own."""
    metadata = compiled.metadata
    extras = ("global_scratch_size", "profile_scratch_size", "launch_cooperative_grid", "launch_pdl")
    if "ptx" not in compiled.asm or any(getattr(metadata, name, 0) for name in extras) or metadata.num_ctas != 1:
        return False
    types = [kind for kind in compiled.src.signature.values() if kind != "constexpr"]
    known = all(kind.startswith("*") or kind in _FORMATS for kind in types)
    return known and count_kernel_parameters(compiled.asm["ptx"]) >= len(types)
