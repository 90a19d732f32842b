"""Newton's method with Armijo backtracking for a batch of small systems of complex equations."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from jpmhc.spectra.chain.fixed_point.contract import FixedPoints, Problem


@dataclass(frozen=True)
class Newton:
    """Newton's method with backtracking.

    Attributes:
        lengths: The step lengths tried in turn (appendix "Newton iteration"); the first that decreases the residual and
            stays admissible is taken.
        stubborn: Whether a row that no length improves takes the shortest all the same. Where one direction is nearly
            neutral, the way to the solution leads over larger residuals.
    """

    lengths: tuple[float, ...] = (1.0, 0.5, 0.25, 0.125)
    stubborn: bool = False
    first_try: int = 30
    stage_iterations: int = 20
    uses_corrections: bool = True

    def for_hard_rows(self) -> Newton:
        """Return the same scheme: what hard rows need is a better start."""
        return self

    def with_shorter_steps(self, factor: float) -> Newton:
        """Return the same scheme: it takes no plain steps."""
        return self

    def solve(self, problem: Problem, start: Tensor, tolerance: float, maximum: int) -> FixedPoints:
        """Solve all rows; one that no step improves takes the problem's safe image, or stops unconverged."""
        result = FixedPoints.unsolved(start)
        index, x = torch.arange(len(start), device=start.device), start
        size, correction = problem.newton_correction(x, index)
        size = size.nan_to_num(nan=torch.inf)
        for count in range(1, maximum + 1):
            result.x[index], result.residual[index], result.iterations[index] = x, size, count
            result.converged[index] = _inside(problem, x, index) & (size <= tolerance)
            active = ~result.converged[index]
            if not bool(active.any()) or count == maximum:
                break
            index, x, size, correction = index[active], x[active], size[active], correction[active]
            moved, x, size, correction = self._backtrack(problem, index, x, size, correction)
            if not bool(moved.any()):
                break
            index, x, correction = index[moved], x[moved], correction[moved]
            size = size[moved].nan_to_num(nan=torch.inf)
        return result

    def _backtrack(
        self, problem: Problem, index: Tensor, x: Tensor, size: Tensor, correction: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return which rows could move [b], and x, the residual's size and the next correction where they are now."""
        moved = torch.zeros(len(index), dtype=torch.bool, device=x.device)
        new_x, new_size, new_correction = x.clone(), size.clone(), correction.clone()
        for length in self.lengths:
            todo = (~moved).nonzero().squeeze(-1)
            if len(todo) == 0:
                break
            candidate = problem.clamp(x[todo] + length * correction[todo])
            trial_size, trial = problem.newton_correction(candidate, index[todo])
            # The Armijo constant is small, as usual: any real decrease will do.
            good = _inside(problem, candidate, index[todo])
            if not self.stubborn or length != self.lengths[-1]:
                good &= trial_size <= (1 - 1e-4 * length) * size[todo]
            place = todo[good]
            new_x[place], new_size[place], new_correction[place] = candidate[good], trial_size[good], trial[good]
            moved[place] = True
        stuck = (~moved).nonzero().squeeze(-1)
        safe = problem.safe_image(x[stuck], index[stuck]) if len(stuck) else None
        if safe is not None:
            new_size[stuck], new_correction[stuck] = problem.newton_correction(safe, index[stuck])
            new_x[stuck] = safe
            moved[stuck] = True
        return moved, new_x, new_size, new_correction


def _inside(problem: Problem, x: Tensor, index: Tensor) -> Tensor:
    return torch.isfinite(x).all(-1) & problem.admissible(x, index)
