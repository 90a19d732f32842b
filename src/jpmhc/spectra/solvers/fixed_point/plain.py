"""The plain fixed-point iteration with damping: slow, with nothing to tune, and the yardstick for the other schemes."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from jpmhc.spectra.solvers.fixed_point.contract import FixedPoints, Problem


@dataclass(frozen=True)
class Plain:
    r"""The damped iteration $x \leftarrow (1 - \beta) x + \beta g(x)$.

    Attributes:
        damping: $\beta$.
    """

    damping: float = 0.5
    first_try: int = 1000
    stage_iterations: int = 200

    def for_hard_rows(self) -> Plain:
        """Return the same scheme: it has nothing to strengthen."""
        return self

    def solve(self, problem: Problem, start: Tensor, tolerance: float, maximum: int) -> FixedPoints:
        """Solve x = g(x) for all rows; the residual is max |g(x) - x| over the problem's scale."""
        result = FixedPoints.unsolved(start)
        index, x = torch.arange(len(start), device=start.device), start
        for count in range(1, maximum + 1):
            r = problem.step(x, index) - x
            residual = (r.abs() / problem.scale(x, index)).amax(-1).nan_to_num(nan=torch.inf)
            result.x[index], result.residual[index], result.iterations[index] = x, residual, count
            result.converged[index] = residual <= tolerance
            active = residual > tolerance
            if not bool(active.any()):
                break
            index, x = index[active], (x + self.damping * r)[active]
        return result
