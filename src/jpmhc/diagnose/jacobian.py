"""Products with the Jacobian of a real model, J v and Jᵀ u, without ever forming it."""

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

# Errors of forward mode if an operation has no forward derivative.
_NO_FORWARD_MODE = (RuntimeError, ValueError)
# The largest relative difference of ⟨u, J v⟩ and ⟨Jᵀ u, v⟩ for one and the same map.
_ADJOINT_TOLERANCE = {"forward mode": 1e-3, "central differences": 3e-2}


@dataclass
class Linearised:
    """A map at one point: its graph, and the method of its derivatives.

    Attributes:
        x: The point, in a graph that leads to y.
        y: The map's value.
        run: The map itself: a new x to a new y, without a graph.
        positions: The leading sizes that input and output share: tokens, or examples where there are no tokens.
        forward: The method for J v: "forward mode" or "central differences".
        batched: Whether several Jᵀ u are computed in one backward pass.
        seconds: The time of one product J v, of one Jᵀ u, and of one row among several Jᵀ u.
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
    """The Jacobian of a linearised map, whole or the block of one position.

    Attributes:
        at: The linearised map.
        position: The number of a token whose output is differentiated by its own input; None for the whole map.
    """

    at: Linearised
    position: int | None = None

    @property
    def shape(self) -> tuple[int, int]:
        """Rows (outputs) and columns (inputs)."""
        count = 1 if self.position is None else math.prod(self.at.positions)
        return self.at.y.numel() // count, self.at.x.numel() // count

    def multiply_transposed(self, vectors: Tensor) -> Tensor:
        """Compute Jᵀ u for rows u. [k, M] → [k, N]"""
        at = self.at
        wide = self._place(vectors, at.y)
        if at.batched:
            gradients = _gradient(at.y, at.x, wide, batched=True)
        else:
            gradients = torch.stack([_gradient(at.y, at.x, row, batched=False) for row in wide])
        return self._take(gradients, at.x).to(vectors.dtype)

    def multiply(self, vectors: Tensor) -> Tensor:
        """Compute J v for rows v, by forward mode or central differences. [k, N] → [k, M]"""
        at = self.at
        push = push_forward if at.forward == "forward mode" else push_by_differences
        wide = self._place(vectors, at.x)
        return self._take(torch.stack([push(at.run, at.x, row) for row in wide]), at.y).to(vectors.dtype)

    def _place(self, vectors: Tensor, like: Tensor) -> Tensor:
        """Shape rows as the map's input or output; outside the position they are zero."""
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
) -> Linearised:
    """Choose the methods for the map's derivatives, check J v and Jᵀ u against each other, and time them.

    Args:
        run: The map.
        x: The point, in a graph that leads to y.
        y: The map's value there.
        positions: The leading sizes that number the tokens.
        ends: The ends of the map in words, for messages.
        seed: Of the vectors of the check.
    """
    if not bool(torch.isfinite(y.detach()).all()):
        raise ValueError(f"the map {ends} gives NaN or infinity at these inputs: its Jacobian is not defined there")
    at = Linearised(x, y, run, positions)
    generator = torch.Generator().manual_seed(seed)
    u, v = (torch.randn(2, t.numel(), generator=generator).to(t.device, t.dtype) for t in (y, x))
    # A random vector: outputs with a constant sum, such as those of a layer norm or a softmax, have Jᵀ1 = 0.
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
            f"the map {ends} and its gradient are two different maps (they differ by {miss:.0%}): part of it runs "
            "without gradients, or differently at every call; choose the part with gradients by between="
        )
    return at


def shared_positions(x: Tensor, y: Tensor) -> tuple[int, ...]:
    """Return the leading sizes that number tokens: all equal ones but the last; for images only the first."""
    most = 1 if max(x.ndim, y.ndim) > 3 else min(x.ndim, y.ndim) - 1
    same = 0
    while same < most and x.shape[same] == y.shape[same]:
        same += 1
    return tuple(x.shape[:same])


def push_forward(run: Callable[[Tensor], Tensor], x: Tensor, direction: Tensor) -> Tensor:
    """Compute J v by forward-mode differentiation."""
    with torch.no_grad(), forward_ad.dual_level(), plain_connections():
        out = forward_ad.unpack_dual(run(forward_ad.make_dual(x.detach(), direction)))
    return torch.zeros_like(out.primal) if out.tangent is None else out.tangent


def push_by_differences(run: Callable[[Tensor], Tensor], x: Tensor, direction: Tensor) -> Tensor:
    """Compute J v by central differences; good to about four digits in float32."""
    point, length = x.detach(), float(direction.norm())
    if length == 0:
        return torch.zeros_like(run(point))
    moved = point[direction != 0]
    step = torch.finfo(x.dtype).eps ** (1 / 3) * max(float(moved.norm()), 1e-3) / length
    with torch.no_grad():
        return (run(point + step * direction) - run(point - step * direction)) / (2 * step)


class plain_connections(warnings.catch_warnings):
    """A context without the warning of connections that they run without their kernels, which is intended here."""

    def __enter__(self) -> Any:
        entered = super().__enter__()
        warnings.filterwarnings("ignore", message="hyper-connection runs on the PyTorch reference")
        return entered


def _has_forward_mode(at: Linearised, direction: Tensor) -> bool:
    try:
        push_forward(at.run, at.x, direction.reshape(at.x.shape))
    except _NO_FORWARD_MODE:
        return False
    return True


def _can_batch(at: Linearised, u: Tensor) -> bool:
    """Say whether several gradients can be taken in one pass; with custom backward passes that often fails."""
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
    """Return the shortest of a few times; work of more than a second is done once."""
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
