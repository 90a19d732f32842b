"""The plain fixed-point iteration, damped: slow, and the yardstick for the other schemes."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from jpmhc.spectra.chain.fixed_point.contract import FixedPoints, Problem


@dataclass(frozen=True)
class Plain:
    r"""The iteration $x \leftarrow (1 - \beta) x + \beta g(x)$.

    Attributes:
        step_length: $\beta$; one takes the whole step.
    """

    step_length: float = 0.5
    first_try: int = 200
    stage_iterations: int = 200
    uses_corrections: bool = False

    def for_hard_rows(self) -> Plain:
        """Return the same scheme: it has nothing to strengthen."""
        return self

    def with_shorter_steps(self, factor: float) -> Plain:
        """Return the scheme with steps shorter by a factor."""
        return replace(self, step_length=self.step_length / factor)

    def solve(self, problem: Problem, start: Tensor, tolerance: float, maximum: int) -> FixedPoints:
        """Solve x = g(x) for all rows; the residual is max |g(x) - x| over the problem's scale."""
        result = FixedPoints.unsolved(start)
        index, x = torch.arange(len(start), device=start.device), start
        for count in range(1, maximum + 1):
            g = problem.image(x, index)
            residual = ((g - x).abs() / problem.scale(x, index)).amax(-1).nan_to_num(nan=torch.inf)
            result.x[index], result.residual[index], result.iterations[index] = x, residual, count
            result.converged[index] = problem.converged(x, index, residual, tolerance)
            active = residual > tolerance
            if not bool(active.any()):
                break
            index, x = index[active], problem.between(x, g, self.step_length)[active]
        return result
