"""Continuation: a solution that is known far above the real axis is led down to the spectral points."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from jpmhc.spectra.chain.fixed_point.contract import NO_IMAGE, FixedPoints, Problem, Scheme

# By how much the height falls from one stage to the next; points that are lost try the next ratio.
_RATIOS = (4.0, 2.0, 1.4)
# The first step from one point to another, as a share of the way between them, and the most steps.
_FIRST_STEP, _STEPS = 0.25, 6
# Before the last stage a rough solution is enough.
_STAGE_TOLERANCE = 1e-3


class Equation(ABC):
    """An equation with a spectral point z as its parameter, one row for each point.

    Its methods are those of `Problem` with the points z [b] that the rows belong to; index [b] are the rows' places
    among all points of the equation.
    """

    @abstractmethod
    def start(self, z: Tensor, index: Tensor) -> Tensor:
        """Return the solution at a large height, to leading order. [b, d]"""

    def image(self, x: Tensor, z: Tensor, index: Tensor) -> Tensor:
        """Return g(x); see `Problem.image`."""
        raise ValueError(NO_IMAGE)

    def newton_correction(self, x: Tensor, z: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
        """Return the residual's size and what Newton adds; see `Problem.newton_correction`."""
        return Problem.newton_correction(AtPoints(self, z, index), x, torch.arange(len(x), device=x.device))

    def safe_image(self, x: Tensor, z: Tensor, index: Tensor) -> Tensor | None:
        """Return a point that is admissible, if there is one; see `Problem.safe_image`."""
        return None

    def between(self, x: Tensor, image: Tensor, share: float) -> Tensor:
        """Return a point between x and g(x); see `Problem.between`."""
        return x + share * (image - x)

    @abstractmethod
    def admissible(self, x: Tensor, z: Tensor, index: Tensor) -> Tensor:
        """Return whether x lies where the solution must be. [b]"""

    def scale(self, x: Tensor, z: Tensor, index: Tensor) -> Tensor:
        """Return what a residual is measured against; see `Problem.scale`."""
        return torch.ones(1, 1, dtype=torch.float64, device=x.device)

    def rounding(self, x: Tensor, z: Tensor, index: Tensor) -> Tensor | None:
        """Return what is added to the scale for rounding; see `Problem.rounding`."""
        return None

    def clamp(self, x: Tensor) -> Tensor:
        """Return the nearest point where the solution can be; see `Problem.clamp`."""
        return x


@dataclass(frozen=True, eq=False)
class AtPoints(Problem):
    """An equation at given points: the problem that a scheme solves.

    Attributes:
        equation: The equation.
        z: The points. [B]
        rows: Their places among all points of the equation. [B]
    """

    equation: Equation
    z: Tensor
    rows: Tensor

    def select(self, rows: Tensor) -> AtPoints:
        return replace(self, z=self.z[rows], rows=self.rows[rows])

    def image(self, x: Tensor, index: Tensor) -> Tensor:
        return self.equation.image(x, self.z[index], self.rows[index])

    def newton_correction(self, x: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
        return self.equation.newton_correction(x, self.z[index], self.rows[index])

    def safe_image(self, x: Tensor, index: Tensor) -> Tensor | None:
        return self.equation.safe_image(x, self.z[index], self.rows[index])

    def between(self, x: Tensor, image: Tensor, share: float) -> Tensor:
        return self.equation.between(x, image, share)

    def admissible(self, x: Tensor, index: Tensor) -> Tensor:
        return self.equation.admissible(x, self.z[index], self.rows[index])

    def scale(self, x: Tensor, index: Tensor) -> Tensor:
        return self.equation.scale(x, self.z[index], self.rows[index])

    def rounding(self, x: Tensor, index: Tensor) -> Tensor | None:
        return self.equation.rounding(x, self.z[index], self.rows[index])

    def clamp(self, x: Tensor) -> Tensor:
        return self.equation.clamp(x)


def lead_down(
    equation: Equation, z: Tensor, scheme: Scheme, *, top: float | Tensor, tolerance: float, maximum: int
) -> FixedPoints:
    """Solve an equation at all points z [B] at once: down from a large height in stages, then to the tolerance.

    Every transform here is known at a large height and analytic in the upper half plane, so that following the
    solution down keeps its branch. Points that were lost are led down again in smaller stages.

    Note:
        The paper's continuation runs along the grid, one point after the other; this one runs down to all points of the
        grid at once, which is the same for one point or a thousand and leaves nothing sequential for a GPU.

    Args:
        equation: What to solve.
        z: Points of the upper half plane. [B]
        scheme: How to iterate on each stage.
        top: A height at which `equation.start` is good; one for all points, or one for each [B].
        tolerance: Of the residual.
        maximum: The most iterations of the last stage.
    """
    rows = torch.arange(len(z), device=z.device)
    top = torch.as_tensor(top, dtype=torch.float64, device=z.device).expand(len(z))
    result = _descend(equation, z, rows, scheme, _RATIOS[0], top, tolerance, maximum)
    for ratio in _RATIOS[1:]:
        rows = result.unconverged()
        if len(rows) == 0:
            break
        result.merge_pass(rows, _descend(equation, z[rows], rows, scheme, ratio, top[rows], tolerance, maximum))
    return result


def _descend(
    equation: Equation,
    z: Tensor,
    rows: Tensor,
    scheme: Scheme,
    ratio: float,
    top: Tensor,
    tolerance: float,
    maximum: int,
) -> FixedPoints:
    """Solve at one height after the other, each from the solution at the height above it."""
    path = points_above(z, top, ratio)
    x = equation.start(path[0], rows)
    spent = torch.zeros(len(z), dtype=torch.int64, device=z.device)
    for point in path[:-1]:
        found = scheme.solve(AtPoints(equation, point, rows), x, _STAGE_TOLERANCE, scheme.stage_iterations)
        x, spent = found.x, spent + found.iterations
    found = scheme.solve(AtPoints(equation, z, rows), x, tolerance, maximum)
    return FixedPoints(found.x, found.converged, found.residual, found.iterations + spent)


def lead_along(
    equation: Equation, known: Tensor, x: Tensor, z: Tensor, rows: Tensor, scheme: Scheme, tolerance: float
) -> FixedPoints:
    """Solve an equation at points z [B] from its solutions x [B, d] at points `known` [B], in steps between them.

    The steps lie on straight lines of log z, in which the unknowns are analytic. Each begins where the slope of the
    step before it leads; after one that fails the next is half as long, after one that succeeds twice.

    Args:
        equation: What to solve.
        known: Points of the upper half plane at which the equation has been solved.
        x: The solutions there.
        z: Points of the upper half plane.
        rows: Their places among all points of the equation.
        scheme: How to iterate in each step.
        tolerance: Of the residual.
    """
    result = FixedPoints.unsolved(x)
    x, slope = x.clone(), torch.zeros_like(x)
    done = torch.zeros_like(z.real)  # the share of the way that is behind
    step = torch.full_like(done, _FIRST_STEP)
    left = torch.arange(len(z), device=z.device)
    for _ in range(_STEPS):
        last = done[left] + step[left] >= 1
        for part, limit, maximum in (
            (left[~last], _STAGE_TOLERANCE, scheme.stage_iterations),
            (left[last], tolerance, scheme.first_try),
        ):
            if len(part) == 0:
                continue
            share = torch.minimum(step[part], 1 - done[part])
            led = equation.clamp(x[part] + share.unsqueeze(-1) * slope[part])
            inside = torch.isfinite(led).all(-1) & equation.admissible(led, z[part], rows[part])
            led = torch.where(inside.unsqueeze(-1), led, x[part])
            behind = done[part] + share
            point = torch.exp((1 - behind) * known[part].log() + behind * z[part].log())
            found = scheme.solve(AtPoints(equation, point, rows[part]), led, limit, maximum)
            result.iterations[part] += found.iterations
            step[part] *= torch.where(found.converged, 2.0, 0.5)
            good = part[found.converged]
            slope[good] = (found.x - x[part])[found.converged] / share[found.converged].unsqueeze(-1)
            x[good], done[good] = found.x[found.converged], behind[found.converged]
            if maximum == scheme.first_try:
                result.x[part], result.residual[part], result.converged[part] = found.x, found.residual, found.converged
        left = left[~result.converged[left]]
        if len(left) == 0:
            break
    return result


def points_above(z: Tensor, top: float | Tensor, ratio: float) -> list[Tensor]:
    """Return the points above z at heights falling from `top` by `ratio` or less, z itself last."""
    start = torch.maximum(z.imag, torch.as_tensor(top, dtype=torch.float64, device=z.device))
    stages = math.ceil(math.log(max(1.0, float((start / z.imag).max()))) / math.log(ratio))
    heights = [z.imag * (start / z.imag) ** (1 - k / stages) for k in range(stages)] if stages else []
    return [torch.complex(z.real, height) for height in heights] + [z]
