"""Products J v and Jᵀ u with the Jacobian J [M, N] of a real model, computed without forming J."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

# The errors that PyTorch raises if an operation has no forward-mode derivative.
_NO_FORWARD_MODE = (RuntimeError, ValueError)
# The largest tolerated relative difference of ⟨u, J v⟩ and ⟨Jᵀ u, v⟩.
_ADJOINT_TOLERANCE = {"forward mode": 1e-3, "central differences": 3e-2}


@dataclass
class LinearisedMap:
    """A map at one input: its autograd graph, and the methods that compute its derivatives.

    Attributes:
        x: The input, from which the autograd graph leads to y.
        y: The output.
        run: The map as a function from an input to an output.
        positions: The leading sizes that input and output share: tokens, or examples of a model without tokens.
        forward: The method for J v: "forward mode" or "central differences".
        batched: Whether one backward pass computes several Jᵀ u.
        seconds: The time of one product J v ("forward"), of one Jᵀ u alone ("backward"), and of one Jᵀ u among several
            ("row").
    """

    x: Tensor
    y: Tensor
    run: Callable[[Tensor], Tensor]
    positions: tuple[int, ...]
    forward: str = "forward mode"
    batched: bool = True
    seconds: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Jacobian:
    """The Jacobian of a linearised map, or the block of one token.

    The block of a token is the derivative of the token's output with respect to the token's input.

    Attributes:
        at: The linearised map.
        position: The token's number; None for the whole Jacobian.
    """

    at: LinearisedMap
    position: int | None = None

    @property
    def shape(self) -> tuple[int, int]:
        """The numbers of rows (outputs) and columns (inputs)."""
        count = 1 if self.position is None else math.prod(self.at.positions)
        return self.at.y.numel() // count, self.at.x.numel() // count

    def multiply_transposed(self, vectors: Tensor) -> Tensor:
        """Compute Jᵀ u for each row u of a matrix. [k, M] → [k, N]"""
        at = self.at
        wide = self._place(vectors, at.y)
        if at.batched:
            gradients = _gradient(at.y, at.x, wide, batched=True)
        else:
            gradients = torch.stack([_gradient(at.y, at.x, row, batched=False) for row in wide])
        return self._take(gradients, at.x).to(vectors.dtype)

    def multiply(self, vectors: Tensor) -> Tensor:
        """Compute J v for each row v of a matrix. [k, N] → [k, M]"""
        at = self.at
        push = push_forward if at.forward == "forward mode" else push_by_differences
        wide = self._place(vectors, at.x)
        return self._take(torch.stack([push(at.run, at.x, row) for row in wide]), at.y).to(vectors.dtype)

    def _place(self, vectors: Tensor, like: Tensor) -> Tensor:
        """Reshape rows to the map's input or output, with zeros at all tokens other than `position`."""
        vectors = vectors.to(like.dtype)
        if self.position is None:
            return vectors.reshape(len(vectors), *like.shape)
        wide = vectors.new_zeros(len(vectors), math.prod(self.at.positions), vectors.shape[-1])
        wide[:, self.position] = vectors
        return wide.reshape(len(vectors), *like.shape)

    def _take(self, wide: Tensor, like: Tensor) -> Tensor:
        if self.position is None:
            return wide.reshape(len(wide), -1)
        return wide.reshape(len(wide), math.prod(self.at.positions), -1)[:, self.position]


def linearise(
    run: Callable[[Tensor], Tensor], x: Tensor, y: Tensor, positions: tuple[int, ...], ends: str, seed: int
) -> LinearisedMap:
    """Choose the methods that compute J v and Jᵀ u, check J v against Jᵀ u, and time both.

    Args:
        run: The map as a function from an input to an output.
        x: The input, from which the autograd graph leads to y.
        y: The output.
        positions: The leading sizes of x and y that count the tokens.
        ends: The ends of the map in words, for messages, such as "from layers.0 to layers.3".
        seed: The seed of the random vectors for the check.
    """
    if not bool(torch.isfinite(y.detach()).all()):
        raise ValueError(f"the map {ends} gives NaN or infinity at these inputs: its Jacobian is not defined there")
    at = LinearisedMap(x, y, run, positions)
    generator = torch.Generator().manual_seed(seed)
    u, v = (torch.randn(2, t.numel(), generator=generator).to(t.device, t.dtype) for t in (y, x))
    # The vector is random because Jᵀ1 = 0 for outputs with a constant sum, such as a softmax.
    if not y.requires_grad or not bool(_gradient(y, x, u[0].reshape(y.shape), batched=False).any()):
        raise ValueError(
            f"the map {ends} does not depend on its input: the output may be detached, made without gradients, or "
            "computed before the input"
        )
    whole = Jacobian(at)
    at.batched = _can_batch(at, u)
    at.seconds["row"] = _time(lambda: whole.multiply_transposed(u), x) / 2
    back = whole.multiply_transposed(u)[0]
    at.forward = "forward mode" if _has_forward_mode(at, v[0]) else "central differences"
    at.seconds["backward"] = at.seconds["row"] if not at.batched else _time(lambda: whole.multiply_transposed(u[:1]), x)
    at.seconds["forward"] = _time(lambda: whole.multiply(v[:1]), x)
    ahead = whole.multiply(v[:1])[0]
    miss = abs(float(u[0] @ ahead - back @ v[0])) / max(float(u[0].norm() * ahead.norm()), 1e-300)
    if not miss < _ADJOINT_TOLERANCE[at.forward]:
        raise ValueError(
            f"the derivatives of the map {ends} contradict each other (they differ by {miss:.0%}): part of it runs "
            "without gradients, or differently at every call; choose the part with gradients by between="
        )
    return at


def shared_positions(x: Tensor, y: Tensor) -> tuple[int, ...]:
    """Return the leading sizes that x and y share, without the last; beyond three dimensions, at most the first."""
    most = 1 if max(x.ndim, y.ndim) > 3 else min(x.ndim, y.ndim) - 1
    same = 0
    while same < most and x.shape[same] == y.shape[same]:
        same += 1
    return tuple(x.shape[:same])


def push_forward(run: Callable[[Tensor], Tensor], x: Tensor, direction: Tensor) -> Tensor:
    """Compute J v for v = `direction` at x by forward-mode differentiation."""
    with torch.no_grad(), forward_ad.dual_level(), plain_connections():
        out = forward_ad.unpack_dual(run(forward_ad.make_dual(x.detach(), direction)))
    return torch.zeros_like(out.primal) if out.tangent is None else out.tangent


def push_by_differences(run: Callable[[Tensor], Tensor], x: Tensor, direction: Tensor) -> Tensor:
    """Compute J v for v = `direction` at x by central differences, to about four digits in float32."""
    point, length = x.detach(), float(direction.norm())
    if length == 0:
        return torch.zeros_like(run(point))
    moved = point[direction != 0]
    step = torch.finfo(x.dtype).eps ** (1 / 3) * max(float(moved.norm()), 1e-3) / length
    with torch.no_grad():
        return (run(point + step * direction) - run(point - step * direction)) / (2 * step)


class plain_connections(warnings.catch_warnings):
    """A context without the warning that a connection runs on the PyTorch reference instead of fused kernels."""

    def __enter__(self) -> Any:
        entered = super().__enter__()
        warnings.filterwarnings("ignore", message="hyper-connection runs on the PyTorch reference")
        return entered


def _has_forward_mode(at: LinearisedMap, direction: Tensor) -> bool:
    try:
        push_forward(at.run, at.x, direction.reshape(at.x.shape))
    except _NO_FORWARD_MODE:
        return False
    return True


def _can_batch(at: LinearisedMap, u: Tensor) -> bool:
    """Return whether one backward pass can compute several gradients; custom backward passes often cannot."""
    try:
        _gradient(at.y, at.x, u.reshape(2, *at.y.shape), batched=True)
    except RuntimeError:
        return False
    return True


def _gradient(y: Tensor, x: Tensor, u: Tensor, batched: bool) -> Tensor:
    (gradient,) = torch.autograd.grad(y, x, u, retain_graph=True, is_grads_batched=batched, allow_unused=True)
    if gradient is None:
        return x.new_zeros(*u.shape[: u.ndim - y.ndim], *x.shape)
    return gradient.detach()


def _time(work: Callable[[], Any], like: Tensor) -> float:
    """Return the shortest time in seconds of up to four calls; stop after a call of more than a second."""
    best = math.inf
    for _ in range(4):
        begin = time.perf_counter()
        work()
        if like.device.type == "cuda":
            torch.cuda.synchronize(like.device)
        best = min(best, time.perf_counter() - begin)
        if best > 1:
            break
    return best
