r"""The loop that solves the equations of `spectra` and `paper`, and the continuation that finds good starts for it.

An `Equation` is a batch of small systems $x = g(x; z)$ in the unknowns x [d], with the spectral point z as the
parameter: one row per point. The image of x is g(x; z), and the residual is g(x; z) - x. A
`Scheme` computes the next iterate from the present one. `solve` runs a scheme until every row has converged.
`lead_down` and `lead_along` call `solve` at a sequence of points, from a point with a known solution to the wanted
points.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from copy import copy
from dataclasses import dataclass
from typing import Generic, Self, TypeVar

import torch
from torch import Tensor

# The ratio of the heights of one stage and the next; rows that do not converge are tried with the next ratio.
_RATIOS = (4.0, 2.0, 1.4)
# The first step from one point to another, as a share of the distance between them, and the largest number of steps.
_FIRST_STEP, _STEPS = 0.25, 6
# The solution of a stage before the last is only the start of the next stage: a rough solution is enough.
_STAGE_TOLERANCE = 1e-3


class Equation:
    """A batch of equations x = g(x; z), given by the map g, by Newton corrections, or by both; one row per point z.

    The methods' arguments describe the rows that are still being solved: the unknowns x [b, d], the points z [b], and
    the rows' numbers in the whole batch, index [b]. A subclass defines `image` or `newton_correction`, or both.
    """

    def image(self, x: Tensor, z: Tensor, index: Tensor) -> Tensor:
        """Return g(x; z), one step of the fixed-point iteration, for the rows `index`. [b, d]"""
        raise ValueError("this method's equation is given by its Newton corrections alone; use the scheme 'newton'")

    def newton_correction(self, x: Tensor, z: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
        """Return the residual's size [b] and Newton's correction to x [b, d].

        By default the derivative in the correction is a difference quotient of g(x; z).
        """
        residual = self.image(x, z, index) - x
        width = 1e-7 * x.abs().clamp_min(1.0)  # [b, d]
        columns = []
        for unknown in range(x.shape[-1]):
            moved = x.clone()
            moved[:, unknown] += width[:, unknown]
            change = self.image(moved, z, index) - moved - residual
            columns.append(change / width[:, unknown : unknown + 1])
        correction, _ = torch.linalg.solve_ex(torch.stack(columns, -1), -residual)
        return (residual.abs() / self.scale(x, z, index)).amax(-1), correction

    def admissible(self, x: Tensor, z: Tensor, index: Tensor) -> Tensor:
        """Return a mask of the admissible rows, whose x lies in the region where the solution must lie. [b]"""
        return torch.ones(len(x), dtype=torch.bool, device=x.device)

    def scale(self, x: Tensor, z: Tensor, index: Tensor) -> Tensor:
        """Return the numbers by which residuals are divided before they are compared with the tolerance.

        The shape is [b, d], or [1, 1] for one number that divides all residuals.
        """
        return torch.ones(1, 1, dtype=torch.float64, device=x.device)

    def rounding(self, x: Tensor, z: Tensor, index: Tensor) -> Tensor | None:
        """Return numbers to add to `scale` to allow for rounding errors of g(x; z); None if these are small. [b, d]"""
        return None

    def between(self, x: Tensor, image: Tensor, share: float) -> Tensor:
        """Return the point a fraction `share` of the way from x to `image`, which is g(x; z). [b, d]

        The point is admissible if x and `image` are.
        """
        return x + share * (image - x)

    def clamp(self, x: Tensor) -> Tensor:
        """Return an admissible point near x if the equation defines such a point, and x otherwise. [b, d]"""
        return x

    def safe_image(self, x: Tensor, z: Tensor, index: Tensor) -> Tensor | None:
        """Return the points to which rows move if no Newton correction improves them; None if there are none. [b, d]"""
        return None


class ContinuedEquation(Equation, ABC):
    """An equation whose solution is known far above the real axis, where a continuation can begin."""

    @abstractmethod
    def start(self, z: Tensor, index: Tensor) -> Tensor:
        """Return the solution x to leading order in 1/z, at points z far above the real axis. [b, d]"""


@dataclass(frozen=True, eq=False)
class FixedPoints:
    """The solutions of a batch of rows.

    Attributes:
        x: The unknowns. [B, d]
        converged: Whether the residual fell below the tolerance at an admissible x. [B]
        residual: The size of the residual at x, as the scheme measures residuals. [B]
        iterations: The number of iterations of each row. [B]
    """

    x: Tensor
    converged: Tensor
    residual: Tensor
    iterations: Tensor

    @classmethod
    def unsolved(cls, start: Tensor) -> FixedPoints:
        """Return results before the first iteration: x is the start [B, d], and no row has converged."""
        return cls(
            x=start.clone(),
            converged=torch.zeros(len(start), dtype=torch.bool, device=start.device),
            residual=torch.full((len(start),), torch.inf, dtype=torch.float64, device=start.device),
            iterations=torch.zeros(len(start), dtype=torch.int64, device=start.device),
        )

    @classmethod
    def concatenate(cls, parts: Sequence[FixedPoints]) -> FixedPoints:
        """Return the results of several batches as one batch, in their order."""
        return cls(*(torch.cat([getattr(part, name) for part in parts]) for name in cls.__annotations__))

    def merge_pass(self, rows: Tensor, later: FixedPoints) -> None:
        """Take over, in place, the rows that a later run of `solve` improved, and add the run's iterations.

        A converged row is better than an unconverged row; otherwise the row with the smaller residual is better.

        Args:
            rows: The numbers, in this batch, of the rows that the later run solved. [b]
            later: The results of the later run. [b]
        """
        smaller = later.residual < self.residual[rows]
        better = (later.converged & ~self.converged[rows]) | (smaller & (later.converged | ~self.converged[rows]))
        improved = rows[better]
        self.x[improved], self.residual[improved] = later.x[better], later.residual[better]
        self.converged[improved] = later.converged[better]
        self.iterations[rows] += later.iterations

    def unconverged(self) -> Tensor:
        """Return the numbers of the rows that have not converged."""
        return (~self.converged).nonzero().squeeze(-1)


@dataclass
class State:
    """An iterate of some rows; a scheme's subclass adds tensors of its own, with one entry per row.

    Attributes:
        x: The unknowns. [b, d]
        residual: The size of the residual at x. [b]
    """

    x: Tensor
    residual: Tensor

    def select(self, rows: Tensor) -> Self:
        """Return the state of the rows that a mask [b] selects."""
        part = copy(self)
        for name, value in vars(self).items():
            if isinstance(value, Tensor) and len(value) == len(rows):
                setattr(part, name, value[rows])
        return part


S = TypeVar("S", bound=State)


class Scheme(ABC):
    """A way to iterate: one `Iteration`, or several that take turns.

    Attributes:
        first_try: The number of iterations after which an unconverged row is solved by continuation instead.
        stage_iterations: The most iterations on one stage of a continuation.
        uses_corrections: Whether the scheme uses an equation's Newton corrections; otherwise it uses the images g(x).
    """

    first_try: int
    stage_iterations: int
    uses_corrections: bool = False

    @abstractmethod
    def phases(self, maximum: int) -> Iterator[tuple[Iteration, int]]:
        """Yield each `Iteration` for the unconverged rows, in turn, with its largest number of steps.

        `maximum` is the limit of `Options`.
        """

    def for_hard_rows(self) -> Scheme:
        """Return the scheme for rows that did not converge within `first_try` iterations."""
        return self


class Iteration(Scheme, Generic[S]):
    """A scheme of one kind of step: `init` evaluates the equation at the start, `step` computes the next iterate.

    Attributes:
        compact: Finished rows are removed from the batch when the share of unfinished rows falls below this number.
    """

    compact: float = 1.0

    @abstractmethod
    def init(self, equation: Equation, x: Tensor, z: Tensor, index: Tensor, tolerance: float) -> S:
        """Return the state at the start x."""

    @abstractmethod
    def step(self, equation: Equation, state: S, z: Tensor, index: Tensor, tolerance: float) -> S:
        """Return the state after one more iteration."""

    def terminate(self, state: S, tolerance: float) -> Tensor:
        """Return a mask of the rows whose iteration ends. [b]"""
        return state.residual <= tolerance

    def phases(self, maximum: int) -> Iterator[tuple[Iteration, int]]:
        yield self, maximum


@dataclass(frozen=True)
class Options:
    """The scheme, the tolerance and the limit with which an equation is solved.

    Attributes:
        tolerance: A row has converged when its residual is below this number.
        maximum: The most iterations of a row; for `AndersonNewton`, the most images g(x).
    """

    scheme: Scheme
    tolerance: float
    maximum: int

    @property
    def rough(self) -> Options:
        """The options for a stage whose solution is only the start of the next stage."""
        return Options(self.scheme, _STAGE_TOLERANCE, self.scheme.stage_iterations)


def solve(equation: Equation, z: Tensor, start: Tensor, options: Options, index: Tensor | None = None) -> FixedPoints:
    """Iterate all rows from `start` [B, d], each until it has converged.

    Args:
        z: The rows' points. [B]
        start: The rows' first iterates. [B, d]
        index: The rows' numbers in the equation's batch; 0, …, B - 1 by default. [B]
    """
    index = torch.arange(len(z), device=z.device) if index is None else index
    result = FixedPoints.unsolved(start)
    unsolved = torch.arange(len(z), device=z.device)
    for phase, limit in options.scheme.phases(options.maximum):
        passed = _iterate(equation, z[unsolved], result.x[unsolved], phase, options.tolerance, limit, index[unsolved])
        result.merge_pass(unsolved, passed)
        unsolved = result.unconverged()
        if len(unsolved) == 0:
            break
    return result


def _iterate(
    equation: Equation, z: Tensor, start: Tensor, scheme: Iteration, tolerance: float, maximum: int, index: Tensor
) -> FixedPoints:
    """Run one iteration scheme and return, for each row, the iterate with the smallest residual."""
    result = FixedPoints.unsolved(start)
    rows = torch.arange(len(start), device=start.device)
    active = torch.ones_like(result.converged)
    state = scheme.init(equation, start, z, index, tolerance)
    for count in range(1, maximum + 1):
        result.iterations[rows[active]] = count
        small = active & (state.residual <= tolerance)
        if bool(small.any()):
            small[small.clone()] = equation.admissible(state.x[small], z[small], index[small])
        better = active & (small | (state.residual < result.residual[rows]))
        result.x[rows[better]], result.residual[rows[better]] = state.x[better], state.residual[better]
        result.converged[rows[better]] = small[better]
        active &= ~scheme.terminate(state, tolerance)
        alive = int(active.sum())
        if alive == 0 or count == maximum:
            break
        if alive < scheme.compact * len(rows):
            rows, z, index, state = rows[active], z[active], index[active], state.select(active)
            active = torch.ones_like(active[active])
        state = scheme.step(equation, state, z, index, tolerance)
    return result


def lead_down(equation: ContinuedEquation, z: Tensor, options: Options, *, top: float | Tensor) -> FixedPoints:
    """Solve an equation at all points z [B] at once, by continuation from points far above z down to z.

    The solution is known far above the real axis and analytic in the upper half-plane, so that it stays on its branch
    on the way down. Rows that did not converge are solved again with smaller steps between the heights.

    Note:
        The paper's continuation runs along the grid, one point after the other. This one runs down to all points of the
        grid at once: it takes as many steps for one point as for a thousand, and a GPU solves them side by side.

    Args:
        z: Points of the upper half-plane. [B]
        options: The scheme and the tolerance; `maximum` is the most iterations of the last stage.
        top: An imaginary part of z at which `equation.start` is a good start; one for all points, or one per point [B].
    """
    top = torch.as_tensor(top, dtype=torch.float64, device=z.device).expand(len(z))
    result = FixedPoints.unsolved(equation.start(z, torch.arange(len(z), device=z.device)))
    for ratio in _RATIOS:
        rows = result.unconverged()
        if len(rows) == 0:
            break
        *path, end = points_above(z[rows], top[rows], ratio)
        x = equation.start([*path, end][0], rows)
        spent = torch.zeros_like(rows)
        for point in path:
            stage = solve(equation, point, x, options.rough, rows)
            x, spent = stage.x, spent + stage.iterations
        result.merge_pass(rows, solve(equation, end, x, options, rows))
        result.iterations[rows] += spent
    return result


def lead_along(equation: Equation, known: Tensor, x: Tensor, z: Tensor, index: Tensor, options: Options) -> FixedPoints:
    """Solve an equation at points z [B] by continuation from points `known` [B] with the solutions x [B, d].

    The steps lie on straight lines in log z, because the unknowns are analytic in log z. The start of each step is
    extrapolated with the slope of the step before. A step that fails halves the length of the next step; a step that
    converges doubles the length. `index` [B] has the rows' numbers in the equation's batch.
    """
    result = FixedPoints.unsolved(x)
    x, slope = x.clone(), torch.zeros_like(x)
    done = torch.zeros_like(z.real)  # the solved share of the way from `known` to z
    step = torch.full_like(done, _FIRST_STEP)
    unsolved = torch.arange(len(z), device=z.device)
    for _ in range(_STEPS):
        last = done[unsolved] + step[unsolved] >= 1
        for rows, stage_options in ((unsolved[~last], options.rough), (unsolved[last], options)):
            if len(rows) == 0:
                continue
            share = torch.minimum(step[rows], 1 - done[rows])
            guess = equation.clamp(x[rows] + share.unsqueeze(-1) * slope[rows])
            good = torch.isfinite(guess).all(-1) & equation.admissible(guess, z[rows], index[rows])
            guess = torch.where(good.unsqueeze(-1), guess, x[rows])
            ahead = done[rows] + share
            point = torch.exp((1 - ahead) * known[rows].log() + ahead * z[rows].log())
            stage = solve(equation, point, guess, stage_options, index[rows])
            result.iterations[rows] += stage.iterations
            step[rows] *= torch.where(stage.converged, 2.0, 0.5)
            reached = rows[stage.converged]
            slope[reached] = (stage.x - x[rows])[stage.converged] / share[stage.converged].unsqueeze(-1)
            x[reached], done[reached] = stage.x[stage.converged], ahead[stage.converged]
            if stage_options is options:
                result.x[rows], result.residual[rows], result.converged[rows] = stage.x, stage.residual, stage.converged
        unsolved = unsolved[~result.converged[unsolved]]
        if len(unsolved) == 0:
            break
    return result


def points_above(z: Tensor, top: float | Tensor, ratio: float) -> list[Tensor]:
    """Return points [B] with the real parts of z and imaginary parts that fall in steps from `top` to those of z.

    A step divides an imaginary part by at most `ratio`. The last points are z.
    """
    start = torch.maximum(z.imag, torch.as_tensor(top, dtype=torch.float64, device=z.device))
    stages = math.ceil(math.log(max(1.0, float((start / z.imag).max()))) / math.log(ratio))
    heights = [z.imag * (start / z.imag) ** (1 - k / stages) for k in range(stages)] if stages else []
    return [torch.complex(z.real, height) for height in heights] + [z]
