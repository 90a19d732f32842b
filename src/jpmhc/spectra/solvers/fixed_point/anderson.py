"""Anderson mixing: a fixed-point iteration that learns from its last steps."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from jpmhc.spectra.solvers.fixed_point.contract import FixedPoints, Problem

# Below this share of rows still active the batch is compacted; compacting on every convergence would copy the history
# more often than it saves work.
_COMPACT = 0.75
# Ridge of the normalised normal equations: their condition is the square of the history's, so that 1e-14 is rounding.
_RIDGE = 1e-14
# What counts as progress of a row.
_IMPROVED = 0.9
_NUDGE = 1.01
_TINY = torch.finfo(torch.float64).tiny


@dataclass(frozen=True)
class Anderson:
    r"""Anderson mixing with an active set.

    The accelerated point $\sum_i c_i g(x_i)$ minimises $\|\sum_i c_i r_i\|^2$ over the last iterates with
    $\sum_i c_i = 1$ and $r_i = g(x_i) - x_i$ (appendix "Anderson/DIIS acceleration"). A candidate that is not finite or
    not admissible is replaced by the plain step $(1-\beta) x + \beta g(x)$. Problems that have converged leave
    the batch, so that the rest of them costs what they alone cost.

    Attributes:
        history: How many differences of iterates are kept, the paper's 5.
        long_history: How many are kept at most once a row has taken `grows_after` iterations. Near a hard edge at zero,
            or with much noise in many layers, the equation is neutral in many directions, and a short history does not
            span them.
        grows_after: When the history begins to grow.
        step_length: The $\beta$ of a plain step; one takes the whole step.
        patience: A row is given up when its smallest residual has not fallen by a tenth in so many iterations.
    """

    history: int = 5
    long_history: int = 30
    grows_after: int = 30
    step_length: float = 0.5
    patience: int = 60
    first_try: int = 150
    stage_iterations: int = 50
    uses_corrections: bool = False

    def for_hard_rows(self) -> Anderson:
        """Return the scheme with the long history from the beginning."""
        return replace(self, history=self.long_history)

    def with_shorter_steps(self, factor: float) -> Anderson:
        """Return the scheme with plain steps shorter by a factor."""
        return replace(self, step_length=self.step_length / factor)

    def solve(self, problem: Problem, start: Tensor, tolerance: float, maximum: int) -> FixedPoints:
        """Solve x = g(x) for all rows; the residual is max |g(x) - x| over the problem's scale."""
        result = FixedPoints.unsolved(start)
        index = torch.arange(len(start), device=start.device)
        x = start
        finished = torch.zeros_like(result.converged)
        best, since = result.residual.clone(), torch.zeros_like(result.iterations)
        past_r = past_g = start.new_empty(len(start), 0, start.shape[-1])  # differences of r and of g, newest last
        last: tuple[Tensor, Tensor] | None = None  # r and g of the iteration before
        # As many differences as unknowns would leave the least squares without a unique answer near convergence.
        grown = max(self.history, min(self.long_history, start.shape[-1] // 2))
        for count in range(1, maximum + 1):
            g = problem.image(x, index)
            r = g - x
            weight = 1 / problem.scale(x, index)
            residual = (r.abs() * weight).amax(-1).nan_to_num(nan=torch.inf)
            active = ~finished[index]
            place = index[active]
            # A row keeps the best x whose residual was measured: what is returned has the residual that is reported.
            result.iterations[place] = count
            better = active & (residual < result.residual[index])
            kept = index[better]
            result.x[kept], result.residual[kept] = x[better], residual[better]
            result.converged[kept] = problem.converged(x[better], kept, residual[better], tolerance)
            improved = residual < _IMPROVED * best
            best, since = torch.where(improved, residual, best), torch.where(improved, 0, since + 1)
            active &= (residual > tolerance) & (since < self.patience)
            finished[index] = ~active
            alive = int(active.sum())
            if alive == 0 or count == maximum:
                break
            if alive < _COMPACT * len(index):
                index, x, g, r = index[active], x[active], g[active], r[active]
                best, since = best[active], since[active]
                weight = weight if len(weight) == 1 else weight[active]
                past_r, past_g = past_r[active], past_g[active]
                last = None if last is None else (last[0][active], last[1][active])
            if last is not None:
                length = self.history if count < self.grows_after else grown
                dr, dg = r - last[0], g - last[1]
                known = (torch.isfinite(dr) & torch.isfinite(dg)).all(-1, keepdim=True)
                dr, dg = torch.where(known, dr, 0.0), torch.where(known, dg, 0.0)
                norm = torch.linalg.vector_norm(dr * weight, dim=-1, keepdim=True).clamp_min(_TINY)
                past_r, past_g = _append(past_r, dr / norm, length), _append(past_g, dg / norm, length)
            last = r, g
            plain = problem.between(x, g, self.step_length)
            candidate = plain if past_r.shape[1] == 0 else _mix(r, g, past_r, past_g, weight)
            good = torch.isfinite(candidate).all(-1) & problem.admissible(candidate, index)
            # Where rounding makes a matrix of the equation singular there is no image: a little further there is.
            plain = torch.where(torch.isfinite(g).all(-1, keepdim=True), plain, _NUDGE * x)
            x = torch.where(good.unsqueeze(-1), candidate, plain)
        return result


def _append(past: Tensor, new: Tensor, kept: int) -> Tensor:
    """Return the history [b, m, d] with a new difference [b, d] at its end, and at most `kept` of them."""
    return torch.cat([past[:, max(0, past.shape[1] + 1 - kept) :], new.unsqueeze(1)], 1)


def _mix(r: Tensor, g: Tensor, past_r: Tensor, past_g: Tensor, weight: Tensor) -> Tensor:
    r"""Return $g - \Delta G\,\gamma$ with $\gamma = \arg\min \|r - \Delta R\,\gamma\|$, by normal equations."""
    if len(weight) > 1:  # one weight for all unknowns changes nothing
        past_r, r = past_r * weight.unsqueeze(1), r * weight
    adjoint = past_r.conj()
    gram = adjoint @ past_r.transpose(-1, -2)  # [b, m, m]
    gram = gram + _RIDGE * torch.eye(gram.shape[-1], dtype=gram.dtype, device=gram.device)
    gamma, _ = torch.linalg.solve_ex(gram, (adjoint @ r.unsqueeze(-1)))
    return g - (gamma.transpose(-1, -2) @ past_g).squeeze(-2)
