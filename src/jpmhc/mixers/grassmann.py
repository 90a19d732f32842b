"""Projection onto a p-dimensional subspace of the streams."""

import math

import torch
from torch import Tensor, nn

from jpmhc import dtensors
from jpmhc.manifolds import grassmann
from jpmhc.mixers.base import Mixer, TritonForm, make_form


class Grassmann(Mixer):
    r"""A rank-p projector $UU^\top$ with orthonormal columns U.

    By default each token's logits are an n × p frame, and U is its orthonormal basis. With `static=True` the frame is
    one parameter, which `jpmhc.optim.GrassmannianOptimizer` moves. The parameter is orthonormalised as well, so that H
    is a projector under any optimiser, and the parameter's gradient is horizontal.

    Args:
        streams: n.
        rank: p, half the streams by default.
        static: Use one frame for all tokens, a parameter, instead of the logits.
    """

    name = "grassmann"
    frame: nn.Parameter

    def __init__(self, streams: int, rank: int | None = None, *, static: bool = False) -> None:
        rank = grassmann.default_rank(streams) if rank is None else rank
        if not isinstance(rank, int) or not 1 <= rank <= streams:
            raise ValueError(f"rank must be between 1 and the number of streams, {streams}, got {rank}")
        super().__init__(streams, 0 if static else streams * rank)
        self.rank = rank
        if static:
            # float32 at least, whatever the default type, as all coefficients
            dtype = torch.promote_types(torch.get_default_dtype(), torch.float32)
            self.frame = nn.Parameter(torch.empty(streams, rank, dtype=dtype))
            self.grassmann_frames = ("frame",)
            self.reset_parameters()

    @classmethod
    def by_default(cls, streams: int, dynamic: bool) -> "Grassmann":
        return cls(streams, static=not dynamic)

    def _start_frame(self) -> Tensor:
        # Equal streams pass unchanged if 1/√n lies in the span; cosines are orthogonal to it and to each other.
        angle = math.pi * (torch.arange(self.streams, dtype=torch.float64) + 0.5) / self.streams
        frame = torch.cos(angle[:, None] * torch.arange(self.rank))
        return frame / frame.norm(dim=0)

    def start(self) -> Tensor:
        return self._start_frame().flatten() if self.logits else torch.empty(0)

    def reset_parameters(self) -> None:
        if not self.logits:
            with torch.no_grad(), torch.device("cpu"):
                dtensors.fill(self.frame, self._start_frame())

    def forward(self, logits: Tensor) -> Tensor:
        logits = self.widen(logits)
        if self.logits:
            return grassmann.project(logits.unflatten(-1, (self.streams, self.rank)))
        return grassmann.project(self.frame).expand(*logits.shape[:-1], -1, -1)

    def violation(self, matrix: Tensor) -> Tensor:
        return grassmann.violation(matrix)

    @classmethod
    def sample(cls, streams: int, shape: tuple[int, ...] = (), *, generator: torch.Generator | None = None) -> Tensor:
        """Draw projectors onto uniformly distributed subspaces of dimension ⌊n/2⌋, at least one. [*shape, n, n]"""
        return grassmann.sample(streams, None, shape, generator=generator)

    def triton_form(self) -> TritonForm | str:
        n, rank = self.streams, self.rank
        return make_form("grassmann", n, n * rank, n, rank, rank=rank)
