"""Batched Newton with Armijo backtracking, and the continuation from a large height that gives it its starts."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from jpmhc.spectra.solvers.fixed_point.anderson import FixedPoints

# Step lengths tried in turn (appendix "Newton iteration").
ARMIJO = (1.0, 0.5, 0.25, 0.125)
# By how much the height falls from one stage of the continuation to the next; points that are lost try the next ratio.
RATIOS = (4.0, 2.0, 1.4)
# Before the last stage a rough solution is enough.
_STAGE_TOLERANCE = 1e-3
_STAGE_MAXIMUM = 20

Evaluate = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


def newton(
    evaluate: Evaluate,
    start: Tensor,
    *,
    tolerance: float,
    maximum: int = 60,
    steps: tuple[float, ...] = ARMIJO,
    admissible: Callable[[Tensor, Tensor], Tensor] | None = None,
    fallback: Callable[[Tensor, Tensor], Tensor] | None = None,
) -> FixedPoints:
    """Solve a batch of small systems of complex equations, each row stopping when it has converged or is stuck.

    Args:
        evaluate: (x, index) -> (size of the residual [b], Newton step [b, d]) for the rows still active, x [b, d] and
            index [b] being their values and places in the batch.
        start: Where to start; rows that are not admissible are never accepted as solutions. [B, d]
        tolerance: A row has converged when its residual is below it and the row is admissible.
        maximum: The most iterations.
        steps: The step lengths tried; the first that decreases the residual and stays admissible is taken.
        admissible: (x, index) -> [b], whether a point lies where the solution must be.
        fallback: (x, index) -> x, a safe step for rows that no Newton step improves; without it they stop unconverged.
    """
    rows = torch.arange(len(start), device=start.device)

    def inside(x: Tensor, index: Tensor) -> Tensor:
        finite = torch.isfinite(x).all(-1)
        return finite if admissible is None else finite & admissible(x, index)

    result = FixedPoints(
        x=start.clone(),
        converged=torch.zeros(len(start), dtype=torch.bool, device=start.device),
        residual=torch.full((len(start),), torch.inf, dtype=torch.float64, device=start.device),
        iterations=torch.zeros(len(start), dtype=torch.int64, device=start.device),
    )
    index, x = rows, start
    size, step = evaluate(x, index)
    size = size.nan_to_num(nan=torch.inf)
    for count in range(1, maximum + 1):
        valid = inside(x, index)
        result.x[index], result.residual[index], result.iterations[index] = x, size, count
        result.converged[index] = valid & (size <= tolerance)
        active = ~result.converged[index]
        if not bool(active.any()) or count == maximum:
            break
        index, x, size, step = index[active], x[active], size[active], step[active]
        moved = torch.zeros(len(index), dtype=torch.bool, device=x.device)
        new_x, new_size, new_step = x.clone(), size.clone(), step.clone()
        for length in steps:
            todo = (~moved).nonzero().squeeze(-1)
            if len(todo) == 0:
                break
            candidate = x[todo] + length * step[todo]
            trial_size, trial_step = evaluate(candidate, index[todo])
            # The Armijo constant is small, as usual: any real decrease will do.
            good = inside(candidate, index[todo]) & (trial_size <= (1 - 1e-4 * length) * size[todo])
            place = todo[good]
            new_x[place], new_size[place], new_step[place] = candidate[good], trial_size[good], trial_step[good]
            moved[place] = True
        stuck = (~moved).nonzero().squeeze(-1)
        if len(stuck) and fallback is not None:
            candidate = fallback(x[stuck], index[stuck])
            trial_size, trial_step = evaluate(candidate, index[stuck])
            new_x[stuck], new_size[stuck], new_step[stuck] = candidate, trial_size, trial_step
            moved[stuck] = True
        if not bool(moved.any()):
            break
        index, x, step = index[moved], new_x[moved], new_step[moved]
        size = new_size[moved].nan_to_num(nan=torch.inf)
    return result


class Equation(Protocol):
    """An equation whose solution is known far above the real axis, to be followed down to the points asked.

    Every method gets rows of unknowns x [b, d], the spectral points z [b] they belong to, and their places in
    the batch.
    """

    def start(self, z: Tensor, index: Tensor) -> Tensor:
        """The solution at a large height, to leading order. [b, d]"""

    def evaluate(self, x: Tensor, z: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
        """The size of the residual [b] and the Newton step [b, d]."""

    def admissible(self, x: Tensor, z: Tensor, index: Tensor) -> Tensor:
        """Whether x lies where the solution must be. [b]"""


def follow(
    equation: Equation,
    z: Tensor,
    *,
    top: float,
    tolerance: float,
    maximum: int,
    steps: tuple[float, ...] = ARMIJO,
    fallback: Callable[[Tensor, Tensor, Tensor], Tensor] | None = None,
) -> FixedPoints:
    """Solve an equation at all points z [B] at once: down from height `top` in stages, then to the tolerance.

    Every transform here is known at a large height and analytic in the upper half plane, so that following the
    solution down keeps its branch. Points that were lost are led down again in smaller stages.

    Note:
        The paper's continuation runs along the grid, one point after the other; this one runs down to all points of the
        grid at once, which is the same for one point or a thousand and leaves nothing sequential for a GPU.

    Args:
        equation: What to solve.
        z: Points of the upper half plane. [B]
        top: A height at which `equation.start` is good.
        tolerance: Of the residual.
        maximum: The most iterations of the last stage.
        steps: As for `newton`.
        fallback: (x, z, index) -> x, as for `newton`.
    """
    rows = torch.arange(len(z), device=z.device)
    result: FixedPoints | None = None
    for ratio in RATIOS:
        found = _descend(equation, z[rows], rows, ratio, top, tolerance, maximum, steps, fallback)
        if result is None:
            result = found
        else:
            better = found.residual < result.residual[rows]
            better |= found.converged
            place = rows[better]
            result.x[place], result.residual[place] = found.x[better], found.residual[better]
            result.converged[place] = found.converged[better]
            result.iterations[rows] += found.iterations
        rows = (~result.converged).nonzero().squeeze(-1)
        if len(rows) == 0:
            break
    assert result is not None
    return result


def _descend(
    equation: Equation,
    z: Tensor,
    rows: Tensor,
    ratio: float,
    top: float,
    tolerance: float,
    maximum: int,
    steps: tuple[float, ...],
    fallback: Callable[[Tensor, Tensor, Tensor], Tensor] | None,
) -> FixedPoints:
    path = descent(z, top, ratio)
    x = equation.start(path[0], rows)
    spent = torch.zeros(len(z), dtype=torch.int64, device=z.device)
    for stage, point in enumerate(path):
        last = stage == len(path) - 1

        def evaluate(x: Tensor, index: Tensor, point: Tensor = point) -> tuple[Tensor, Tensor]:
            return equation.evaluate(x, point[index], rows[index])

        def admissible(x: Tensor, index: Tensor, point: Tensor = point) -> Tensor:
            return equation.admissible(x, point[index], rows[index])

        def safe_step(x: Tensor, index: Tensor, point: Tensor = point) -> Tensor:
            assert fallback is not None
            return fallback(x, point[index], rows[index])

        found = newton(
            evaluate,
            x,
            tolerance=tolerance if last else _STAGE_TOLERANCE,
            maximum=maximum if last else _STAGE_MAXIMUM,
            steps=steps,
            admissible=admissible,
            fallback=None if fallback is None else safe_step,
        )
        x = found.x
        spent += found.iterations
    return FixedPoints(found.x, found.converged, found.residual, spent)


def descent(z: Tensor, top: float, ratio: float) -> list[Tensor]:
    """The points above z at heights falling from `top` by `ratio` or less, z itself last."""
    start = z.imag.clamp_min(top)
    stages = math.ceil(math.log(max(1.0, float((start / z.imag).max()))) / math.log(ratio))
    heights = [z.imag * (start / z.imag) ** (1 - k / stages) for k in range(stages)] if stages else []
    return [torch.complex(z.real, height) for height in heights] + [z]
