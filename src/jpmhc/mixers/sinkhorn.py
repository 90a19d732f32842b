"""Manifold-constrained hyper-connections (mHC): doubly stochastic matrices from Sinkhorn–Knopp iterations."""

import torch
from torch import Tensor

from jpmhc import checks
from jpmhc.manifolds import birkhoff
from jpmhc.mixers.base import Mixer, TritonForm, make_form, start_logit


class Sinkhorn(Mixer):
    """Matrices that Sinkhorn–Knopp iterations have made doubly stochastic, as far as the iterations converged.

    Args:
        streams: n.
        iterations: Row-then-column normalisations, T = 20 in the paper.
        tolerance: Freeze a matrix once its row sums differ from one by at most this much; None: never.
        gradient: "direct" (exact gradient of the converged H), "gauss_seidel" (the paper's iteration for it) or
            "unrolled" (gradient of the T iterations).
        eps: Added to sums and entries as in DeepSeek-V4 (see `birkhoff.project`); needs the gradient "unrolled".
        clamp: Bound of the logits' absolute values; None: no bound, which needs an eps.
        first: The side, "rows" or "columns", that every iteration normalises first; the other side's sums end at one.
        gradient_iterations: Iterations k of "gauss_seidel"; None: from the paper's formula, 16 for four streams.
        transposed: The logits are the rows of Hᵀ, as in models that multiply the streams by the transposed matrix.
    """

    name = "sinkhorn"
    ensemble = "bistochastic"

    def __init__(
        self,
        streams: int,
        *,
        iterations: int = 20,
        tolerance: float | None = None,
        gradient: str = "direct",
        eps: float = 0.0,
        clamp: float | None = birkhoff.LOGIT_BOUND,
        first: str = "rows",
        gradient_iterations: int | None = None,
        transposed: bool = False,
    ) -> None:
        super().__init__(streams, streams**2)
        birkhoff.check_settings(iterations, tolerance, gradient, eps, clamp, first, gradient_iterations)
        checks.switch(transposed, "transposed")
        self.iterations, self.tolerance, self.gradient = iterations, tolerance, gradient
        self.eps, self.clamp, self.first, self.transposed = eps, clamp, first, transposed
        self.gradient_iterations = gradient_iterations

    def start(self) -> Tensor:
        return (start_logit(self.streams) * torch.eye(self.streams, dtype=torch.float64)).flatten()

    def forward(self, logits: Tensor) -> Tensor:
        matrix = self.widen(logits).unflatten(-1, (self.streams, self.streams))
        if self.transposed:
            matrix = matrix.mT
        return birkhoff.normalise(
            matrix,
            self.iterations,
            self.tolerance,
            self.gradient,
            self.eps,
            self.clamp,
            self.first,
            self.gradient_iterations,
        )

    def violation(self, matrix: Tensor) -> Tensor:
        return birkhoff.violation(matrix)

    @classmethod
    def sample(cls, streams: int, shape: tuple[int, ...] = (), *, generator: torch.Generator | None = None) -> Tensor:
        """Draw Sinkhorn projections of standard normal logits, iterated until they converge. [*shape, n, n]"""
        return birkhoff.sample(streams, shape, generator=generator)

    def triton_form(self) -> TritonForm | str:
        if self.tolerance is not None and self.gradient == "unrolled":
            return 'the kernels cannot combine gradient="unrolled" with a tolerance'
        n, rows_first = self.streams, self.first == "rows"
        return make_form(
            "sinkhorn",
            n,
            self.logits,
            n,
            n,
            iterations=self.iterations,
            tolerance=None if self.tolerance is None else float(self.tolerance),
            gradient=self.gradient,
            steps=self.gradient_iterations or birkhoff.gauss_seidel_steps(n),
            eps=float(self.eps),
            clamp=None if self.clamp is None else float(self.clamp),
            transposed=self.transposed,
            first=2 if rows_first else 1,  # the axes of [tokens, n, n] over which an iteration sums first and second
            second=1 if rows_first else 2,
        )
