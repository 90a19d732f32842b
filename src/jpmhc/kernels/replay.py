"""Record the steps of passes, and replay them with little work on the host.

A step allocates tensors and launches kernels. For arguments of the same shapes it always does the same, only at other
addresses in memory. So the second run of a step is recorded: the tensors that it allocates, and the kernels that it
launches, with their arguments. Later runs allocate such tensors, write the addresses into one block of memory and
launch the kernels from there, without the step's Python code. A step that calls another operation of PyTorch, such as a
sum, is never replayed. A step must launch its kernels by a `Launcher`: other launches are not recorded.
"""

import functools
import operator
from collections.abc import Callable, Sequence
from threading import get_ident
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from jpmhc.kernels.driver import PackedLaunches, can_launch_directly
from jpmhc.kernels.launch import BufferPart, Extent, Launcher, interception

Launch = tuple[Launcher, tuple[int, ...], list[Any]]  # a kernel, its grid and its arguments

MOST_RECORDINGS = 1024  # of all steps together; when there are more, all are deleted
_ALLOCATIONS = {
    torch.ops.aten.empty.memory_format,
    torch.ops.aten.empty_like.default,
    torch.ops.aten.empty_strided.default,
    torch.ops.aten.new_empty.default,
    torch.ops.aten.new_empty_strided.default,
}

_RAN_ONCE, _NOT_REPLAYABLE = "ran once", "cannot be replayed"
_recordings: dict[tuple[Any, ...], "Recording | str"] = {}  # by step, thread and arguments; a text is one of these two


def replayed(step: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that replays a step's recording, or runs the step if it has none.

    The step's first argument is a tensor; the others are tensors, specs, switches and None. The first tensor's shape
    and type and the other tensors' sizes in bytes must determine all shapes and types. A recording belongs to one
    thread, because it has its own memory for the addresses.
    """

    @functools.wraps(step)
    def run(*arguments: Any) -> Any:
        tensors: list[Tensor] = []
        sizes: list[Any] = []  # and the other arguments
        for argument in arguments:
            if isinstance(argument, Tensor):
                tensors.append(argument)
                sizes.append(argument.nbytes)
            else:
                sizes.append(argument)
        addresses = list(map(Tensor.data_ptr, tensors))
        # No replay if the step copies a tensor, which is not contiguous or does not start at a multiple of 16 bytes.
        # Nor inside a step that is being recorded, because its recording must contain this step's launches.
        if (
            interception.on_launch is not None
            or functools.reduce(operator.or_, addresses) & 15
            or not all(map(Tensor.is_contiguous, tensors))
        ):
            return step(*arguments)
        first = arguments[0]
        key = (step, get_ident(), first.shape, first.dtype, first.device, *sizes)
        recording = _recordings.get(key)
        if not isinstance(recording, Recording):
            return _run_or_record(key, step, arguments, tensors)
        results = recording.run(tensors, addresses)
        return step(*arguments) if results is None else results

    return run


def _run_or_record(
    key: tuple[Any, ...], step: Callable[..., Any], arguments: tuple[Any, ...], tensors: list[Tensor]
) -> Any:
    """Run a step and return its results. Record the second run, unless two of its tensors have the same address.

    Shapes that occur only once are not worth a recording.
    """
    seen = _recordings.get(key)
    if seen is None:
        if len(_recordings) >= MOST_RECORDINGS:
            _recordings.clear()
        _recordings[key] = _RAN_ONCE
    if seen != _RAN_ONCE or len({t.data_ptr() for t in tensors}) < len(tensors):
        return step(*arguments)
    with _Tape() as tape:
        results = step(*arguments)
    _recordings[key] = make_recording(tape, tensors, results) or _NOT_REPLAYABLE
    return results


class _Tape(TorchDispatchMode):
    """A recorder of a step's allocations and launches; `complete` is False if the step calls other operations."""

    def __init__(self) -> None:
        super().__init__()
        self.allocated: list[Tensor] = []
        self.launches: list[tuple[Launcher, tuple[int, ...], tuple[Any, ...]]] = []
        self.launching, self.complete = False, True

    def __enter__(self) -> "_Tape":
        interception.on_launch = self.write_launch
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        interception.on_launch = None
        super().__exit__(*error)

    def write_launch(self, launcher: Launcher, grid: tuple[int, ...], arguments: tuple[Any, ...]) -> None:
        self.launches.append((launcher, grid, arguments))
        self.launching = True  # PyTorch's operations inside a launch are not the step's
        launcher.run(grid, *arguments)
        self.launching = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if self.launching:
            return result
        if func in _ALLOCATIONS:
            self.allocated.append(result)
        elif not func.is_view:
            self.complete = False
        return result


def make_recording(tape: _Tape, tensors: list[Tensor], results: Any) -> "Recording | None":
    """Return the recording of a step that was run with these tensors, or None if the step cannot be replayed."""
    sources = [*tensors, *tape.allocated]
    indices = {t.data_ptr(): k for k, t in enumerate(sources) if t.numel()}
    several = isinstance(results, tuple)
    returned = [
        None if r is None else next((k for k, t in enumerate(sources) if t is r or _are_same(t, r)), -1)
        for r in (results if several else (results,))
    ]
    if not tape.complete or -1 in returned:
        return None
    launches: list[Launch] = []
    for launcher, grid, arguments in tape.launches:
        given: list[Any] = []
        for argument in arguments:
            if argument is None or isinstance(argument, int):
                given.append(argument)
                continue
            buffer, extent = argument, None
            if isinstance(argument, BufferPart):
                buffer, extent = argument.buffer, argument.extent
            if buffer.data_ptr() not in indices:
                return None
            given.append(Source(indices[buffer.data_ptr()], extent))
        launches.append((launcher, grid, given))
    return Recording(tape.allocated, launches, returned, several, tensors[0])


def _are_same(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors have the same address, type, shape and strides; empty tensors have no address."""
    same_memory = one.data_ptr() == other.data_ptr() and one.dtype == other.dtype and one.numel() > 0
    return same_memory and one.shape == other.shape and one.stride() == other.stride()


class Source(NamedTuple):
    """The origin of a kernel's argument: the index of a tensor that the step got or allocated, and the part of it."""

    index: int
    extent: Extent | None  # None: the whole tensor

    @property
    def offset(self) -> int:
        """The number of bytes in the tensor before the argument."""
        return 0 if self.extent is None else self.extent[0]

    def find(self, tensors: Sequence[Tensor]) -> Tensor:
        """Return the argument as a tensor, from the tensors that the step got and allocated."""
        tensor = tensors[self.index]
        return tensor if self.extent is None else BufferPart(tensor, self.extent, 0).tensor()


class Recording:
    """A step's allocations and launches, which can be repeated for tensors of the same shapes.

    Args:
        allocated: The tensors that the step allocates, in order.
        launches: The kernels with their grids and arguments, in which each tensor is a `Source`.
        returned: For each result of the step, its index among the arguments and allocated tensors, or None.
        several: Whether the step returns a tuple.
        like: A tensor on the step's device.
    """

    def __init__(
        self, allocated: list[Tensor], launches: list[Launch], returned: list[int | None], several: bool, like: Tensor
    ) -> None:
        self.launches, self.several = launches, several
        self.device = like.get_device()
        self.allocations = [_prepare_allocation(tensor) for tensor in allocated]
        pointers = sorted({(a.index, a.offset) for _, _, given in launches for a in given if type(a) is Source})
        self.indices, self.offsets = [index for index, _ in pointers], [offset for _, offset in pointers]
        self.returned = [-1 if k is None else k for k in returned]  # `run` puts None behind the last tensor
        self.packed: PackedLaunches | None = None
        if like.is_cuda:
            compiled = [launcher.compiled.get(self.device) for launcher, _, _ in launches]
            if all(kernel is not None and can_launch_directly(kernel) for kernel in compiled):
                slots = {pointer: k for k, pointer in enumerate(pointers)}
                arguments = [
                    [("slot", slots[a.index, a.offset]) if type(a) is Source else ("value", a) for a in given]
                    for _, _, given in launches
                ]
                self.packed = PackedLaunches(compiled, [grid for _, grid, _ in launches], arguments, len(slots))

    def run(self, tensors: list[Any], addresses: list[int]) -> Any:
        """Repeat the step for tensors at these addresses. Return its results, or None if it must run without replay."""
        if self.device >= 0 and torch._C._cuda_getDevice() != self.device:
            return None
        new_tensors = [allocate() for allocate in self.allocations]
        tensors += new_tensors
        if self.packed is None:
            for launcher, grid, given in self.launches:
                launcher.run(grid, *(a.find(tensors) if type(a) is Source else a for a in given))
        else:
            addresses += map(Tensor.data_ptr, new_tensors)
            starts = map(addresses.__getitem__, self.indices)
            stream = torch._C._cuda_getCurrentRawStream(self.device)
            if not self.packed.launch(map(operator.add, starts, self.offsets), stream):
                return None
        tensors.append(None)
        results = tuple([tensors[k] for k in self.returned])
        return results if self.several else results[0]


def _prepare_allocation(like: Tensor) -> Callable[[], Tensor]:
    """Return a function that allocates a tensor like this one. A CUDA tensor's device must be current at the call."""
    fast = getattr(torch._C._dynamo.guards, "_empty_strided_cuda", None)  # as Inductor's graphs allocate
    if like.is_cuda and fast is not None:
        return functools.partial(fast, tuple(like.shape), like.stride(), like.dtype)
    return functools.partial(
        torch.empty_strided, tuple(like.shape), like.stride(), dtype=like.dtype, device=like.device
    )
