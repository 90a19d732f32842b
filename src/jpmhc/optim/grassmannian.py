"""A Riemannian optimiser for Grassmann frames, which works together with any optimiser of the other parameters.

A Grassmann frame is an n × p matrix with orthonormal columns, of which only the columns' span matters.
"""

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from jpmhc.manifolds import grassmann
from jpmhc.optim.base import GroupwiseOptimizer, ParameterGroup


def grassmann_frames(model: nn.Module) -> dict[str, Tensor]:
    """Return every Grassmann frame of a model by name; the model may be in a wrapper (such as DDP) as its `module`.

    A module lists the names of its frames in the attribute `grassmann_frames`. A frame is a parameter, or a buffer if
    wrappers that shard parameters must leave it whole.

    >>> model = nn.Module()
    >>> model.frame, model.grassmann_frames = nn.Parameter(torch.eye(4, 2)), ("frame",)
    >>> list(grassmann_frames(model))
    ['frame']
    """
    while isinstance(inner := getattr(model, "module", None), nn.Module):
        model = inner
    frames = {}
    for path, module in model.named_modules():
        for name in getattr(module, "grassmann_frames", ()):
            frames[f"{path}.{name}" if path else name] = getattr(module, name)
    return frames


class GrassmannianOptimizer(GroupwiseOptimizer):
    r"""Cayley-Adam for the Grassmann frames of a model, and an inner optimiser for its other parameters.

    For a frame :math:`U \in St(n, p)` with Euclidean gradient :math:`G` (alg. cayley-adam):

    1. horizontal gradient :math:`(I - UU^\top) G` (eq. horizontal-proj);
    2. momentum :math:`M \leftarrow \beta_1 M + (1 - \beta_1) G_{hor}`; :math:`\hat M` is M or, with `adaptive`, M
       scaled by second moments as in Adam;
    3. Cayley retraction along the skew matrix :math:`W = \hat M U^\top - U \hat M^\top` by fixed-point iteration;
    4. QR correction, where R has a positive diagonal, which makes the frame orthonormal to rounding.

    All frames of one shape are updated together. The step counter is a tensor, so the host never waits for the device.

    Args:
        model: The model with the frames, wrapped or not.
        inner: Optimiser of the other parameters; frames are removed from its groups. None: step the frames alone.
        lr: Step size along the manifold; 0.01 in the paper's table of variants.
        betas: Decay of the moments (eqs. cayley-adam-m and cayley-adam-v).
        adaptive: Scale the momentum by second moments (eq. cayley-adam-scaled); off by default, as in the paper.
        eps: Added to the root of the second moment.
        iterations: Fixed-point iterations of the retraction; None: the exact retraction.

    Note:
        The paper's algorithm steps along :math:`+\alpha \hat M`, which ascends; this class steps along
        :math:`-\alpha \hat M`.

    >>> model = nn.Module()
    >>> model.frame, model.grassmann_frames = nn.Parameter(torch.eye(4, 2)), ("frame",)
    >>> optimizer = GrassmannianOptimizer(model, lr=0.1)
    >>> model.frame[2:].sum().backward()
    >>> optimizer.step()
    >>> bool((model.frame.mT @ model.frame - torch.eye(2)).abs().max() < 1e-5)
    True
    """

    STATE: ClassVar = ("step", "momentum", "second")
    """Tensors of each frame's state: a step counter, then tensors of the frame's shape."""

    def __init__(
        self,
        model: nn.Module,
        inner: Optimizer | None = None,
        lr: float = 1e-2,
        betas: tuple[float, float] = (0.9, 0.999),
        *,
        adaptive: bool = False,
        eps: float = 1e-8,
        iterations: int | None = 2,
    ) -> None:
        frames = list(grassmann_frames(model).values())
        if not frames:
            raise ValueError("the model has no Grassmann frame; its other parameters need no GrassmannianOptimizer")
        super().__init__(frames, dict(lr=lr, betas=betas, adaptive=adaptive, eps=eps, iterations=iterations))
        self.inner = inner
        if inner is not None:
            ours = {id(frame) for frame in frames}
            for group in inner.param_groups:
                group["params"] = [p for p in group["params"] if id(p) not in ours]

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update every frame that has a gradient, and step the inner optimiser; return the result of `closure`."""
        loss = super().step(closure)
        if self.inner is not None:
            self.inner.step()
        return loss

    def update_group(self, group: ParameterGroup) -> None:
        by_shape: dict[tuple[torch.Size, torch.dtype, torch.device], list[Tensor]] = {}
        for frame in group["params"]:
            if frame.grad is not None:
                by_shape.setdefault((frame.shape, frame.dtype, frame.device), []).append(frame)
        for frames in by_shape.values():
            self._update(group, frames)

    def _update(self, group: ParameterGroup, frames: list[Tensor]) -> None:
        for frame in frames:
            if not self.state[frame]:
                self.state[frame] = {
                    "step": torch.zeros((), dtype=torch.float32, device=frame.device),
                    "momentum": torch.zeros_like(frame),
                    "second": torch.zeros_like(frame),
                }
        states = [self.state[frame] for frame in frames]
        beta1, beta2 = group["betas"]
        u = torch.stack(frames)  # [k, ..., n, p]
        gradient = torch.stack([frame.grad for frame in frames if frame.grad is not None])
        horizontal = grassmann.horizontal(u, gradient)  # eq. horizontal-proj
        momentum = torch.stack([s["momentum"] for s in states]).lerp_(horizontal, 1 - beta1)  # eq. cayley-adam-m
        second = torch.stack([s["second"] for s in states])
        second = second.mul_(beta2).addcmul_(horizontal, horizontal, value=1 - beta2)  # eq. cayley-adam-v
        step = torch.stack([s["step"] for s in states]).add_(1)
        direction = momentum
        if group["adaptive"]:  # eq. cayley-adam-scaled
            t = step.to(u.dtype).view(-1, *(1,) * (u.dim() - 1))
            direction = (momentum / (1 - beta1**t)) / ((second / (1 - beta2**t)).sqrt() + group["eps"])
        moved = grassmann.retract(u, -direction, group["lr"], group["iterations"])  # eq. cayley-retract-iter
        moved = grassmann.orthonormalize(moved)  # eq. qr-retraction
        for i, (frame, state) in enumerate(zip(frames, states)):
            frame.copy_(moved[i])
            state["momentum"].copy_(momentum[i])
            state["second"].copy_(second[i])
            state["step"].copy_(step[i])

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients of the frames and of the inner optimiser's parameters."""
        super().zero_grad(set_to_none)
        if self.inner is not None:
            self.inner.zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        """Return a dictionary of the frames' state ("frames") and the inner optimiser's state ("inner")."""
        return {"frames": super().state_dict(), "inner": None if self.inner is None else self.inner.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if (state_dict["inner"] is None) != (self.inner is None):
            raise ValueError("the saved state does not fit: only one of it and this optimiser has an inner optimiser")
        super().load_state_dict(state_dict["frames"])
        if self.inner is not None:
            self.inner.load_state_dict(state_dict["inner"])
