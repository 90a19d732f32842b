"""Anderson mixing: a fixed-point iteration that learns from its last steps."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from jpmhc.spectra.chain.fixed_point.contract import FixedPoints, Problem

# Below this share of rows still active the batch is compacted; compacting on every convergence would copy the history
# more often than it saves work.
_COMPACT = 0.75
# Ridge of the normalised normal equations: their condition is the square of the history's, so that 1e-14 is rounding.
_RIDGE = 1e-14
# What counts as progress of a row.
_IMPROVED = 0.9
_NUDGE = 1.01
# How often rounding is asked for.
_ROUNDING_EVERY = 10
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
        last: tuple[Tensor, Tensor] | None = None  # r and g of the iteration before
        # As many differences as unknowns would leave the least squares without a unique answer near convergence.
        grown = max(self.history, min(self.long_history, start.shape[-1] // 2))
        past = _History(start, grown)
        rounding: Tensor | None = None
        for count in range(1, maximum + 1):
            g = problem.image(x, index)
            r = g - x
            if count % _ROUNDING_EVERY == 0:
                rounding = problem.rounding(x, index)
            weight = _weigh_residuals(problem, x, index, r, rounding, tolerance)
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
                rounding = None if rounding is None else rounding[active]
                past.keep(active)
                last = None if last is None else (last[0][active], last[1][active])
            if last is not None:
                length = self.history if count < self.grows_after else grown
                dr, dg = r - last[0], g - last[1]
                known = (torch.isfinite(dr) & torch.isfinite(dg)).all(-1, keepdim=True)
                dr, dg = torch.where(known, dr, 0.0), torch.where(known, dg, 0.0)
                past.add(dr * weight, dg, length)
            last = r, g
            plain = problem.between(x, g, self.step_length)
            candidate = plain if past.used == 0 else problem.clamp(past.mix(r * weight, g))
            good = torch.isfinite(candidate).all(-1) & problem.admissible(candidate, index)
            # Where rounding makes a matrix of the equation singular there is no image: a little further there is.
            plain = torch.where(torch.isfinite(g).all(-1, keepdim=True), plain, _NUDGE * x)
            x = torch.where(good.unsqueeze(-1), candidate, plain)
        return result


def _weigh_residuals(
    problem: Problem, x: Tensor, index: Tensor, r: Tensor, rounding: Tensor | None, tolerance: float
) -> Tensor:
    """Return what residuals r are multiplied by: one over their scale, to which rounding is added. [b, d] or [1, 1]

    What rounding was some iterations ago it need not be now: rows that seem to have converged are asked for it again,
    and `rounding` is brought up to date.
    """
    scale = problem.scale(x, index)
    if rounding is None:
        return 1 / scale
    weight = 1 / (scale + rounding)
    small = ((r.abs() * weight).amax(-1) <= tolerance).nonzero().squeeze(-1)
    if len(small):
        now = problem.rounding(x[small], index[small])
        assert now is not None
        rounding[small], weight[small] = now, 1 / (scale[small] + now)
    return weight


class _History:
    """Keeps the last differences of r (weighted) and of g, and the Gram matrix of r's.

    Both differences are divided by the length of r's difference.

    Args:
        like: What one iterate looks like. [b, d]
        most: How many differences are kept at most.
    """

    def __init__(self, like: Tensor, most: int) -> None:
        self.r, self.g = (like.new_empty(len(like), most, like.shape[-1]) for _ in range(2))
        self.gram = like.new_empty(len(like), most, most)
        self.used = self.newest = 0

    def keep(self, rows: Tensor) -> None:
        """Forget all other rows."""
        self.r, self.g, self.gram = self.r[rows], self.g[rows], self.gram[rows]

    def add(self, r: Tensor, g: Tensor, length: int) -> None:
        """Add differences [b, d], in the place of the oldest where there are `length` of them."""
        if self.used < length:
            self.newest, self.used = self.used, self.used + 1
        else:
            self.newest = (self.newest + 1) % length
        norm = torch.linalg.vector_norm(r, dim=-1, keepdim=True).clamp_min(_TINY)
        self.r[:, self.newest], self.g[:, self.newest] = r / norm, g / norm
        row = (self.r[:, : self.used].conj() @ self.r[:, self.newest].unsqueeze(-1)).squeeze(-1)
        self.gram[:, : self.used, self.newest] = row
        self.gram[:, self.newest, : self.used] = row.conj()

    def mix(self, r: Tensor, g: Tensor) -> Tensor:
        r"""Return $g - \Delta G\,\gamma$ with $\gamma = \arg\min \|r - \Delta R\,\gamma\|$, by normal equations."""
        past_r, past_g = self.r[:, : self.used], self.g[:, : self.used]
        eye = torch.eye(self.used, dtype=r.dtype, device=r.device)
        gram = self.gram[:, : self.used, : self.used] + _RIDGE * eye
        gamma, _ = torch.linalg.solve_ex(gram, past_r.conj() @ r.unsqueeze(-1))
        return g - (gamma.transpose(-1, -2) @ past_g).squeeze(-2)
