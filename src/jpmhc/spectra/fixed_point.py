r"""The loop that solves every equation of this package and of `paper`, and the continuation that gives it good starts.

An `Equation` is a batch of small systems $x = g(x; z)$ with the spectral point z as its parameter, one row per point. A
`Scheme` says how to go from one iterate to the next. `solve` runs a scheme until every row has converged; `lead_down`
and `lead_along` call it at points between one where the solution is known and the points asked for.
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

# By how much the height falls from one stage to the next; rows that do not converge try the next ratio.
_RATIOS = (4.0, 2.0, 1.4)
# The first step from one point to another, as a share of the way between them, and the most steps.
_FIRST_STEP, _STEPS = 0.25, 6
# A stage before the last only starts the next one: a rough solution is enough.
_STAGE_TOLERANCE = 1e-3


class Equation:
    """A batch of systems of equations of one size, by fixed points x = g(x) or by Newton corrections.

    Every method takes the rows that are still being solved: their unknowns x [b, d], their points z [b], and their
    numbers in the whole batch, index [b]. An equation has `image` or `newton_correction`, or both.
    """

    def start(self, z: Tensor, index: Tensor) -> Tensor:
        """Return the solution at a large height, to leading order. [b, d]"""
        raise NotImplementedError

    def image(self, x: Tensor, z: Tensor, index: Tensor) -> Tensor:
        """Return g(x). [b, d]"""
        raise ValueError("this method's equation is given by its Newton corrections alone; use the scheme 'newton'")

    def newton_correction(self, x: Tensor, z: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
        """Return the residual's size [b] and the correction that Newton adds to x [b, d]; by differences of g here."""
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
        """Return whether x lies where the solution must be. [b]"""
        return torch.ones(len(x), dtype=torch.bool, device=x.device)

    def scale(self, x: Tensor, z: Tensor, index: Tensor) -> Tensor:
        """Return the size that a residual is measured against. [b, d], or [1, 1] for all"""
        return torch.ones(1, 1, dtype=torch.float64, device=x.device)

    def rounding(self, x: Tensor, z: Tensor, index: Tensor) -> Tensor | None:
        """Return the number to add to the scale because rounding moves g(x), if it may be large. [b, d]"""
        return None

    def between(self, x: Tensor, image: Tensor, share: float) -> Tensor:
        """Return a point a share of the way from x to g(x), which is admissible if both are. [b, d]"""
        return x + share * (image - x)

    def clamp(self, x: Tensor) -> Tensor:
        """Return the admissible point nearest to x, for equations that know it. [b, d]"""
        return x

    def safe_image(self, x: Tensor, z: Tensor, index: Tensor) -> Tensor | None:
        """Return a point that is always admissible, for rows that no Newton correction improves. [b, d]"""
        return None


@dataclass(frozen=True, eq=False)
class FixedPoints:
    """The results of a batch of rows.

    Attributes:
        x: The unknowns. [B, d]
        converged: Whether the residual fell below the tolerance at an admissible x. [B]
        residual: How far x is from solving its equation, as the scheme measures it. [B]
        iterations: How many iterations the row took. [B]
    """

    x: Tensor
    converged: Tensor
    residual: Tensor
    iterations: Tensor

    @classmethod
    def unsolved(cls, start: Tensor) -> FixedPoints:
        """Return the state before the first iteration."""
        return cls(
            x=start.clone(),
            converged=torch.zeros(len(start), dtype=torch.bool, device=start.device),
            residual=torch.full((len(start),), torch.inf, dtype=torch.float64, device=start.device),
            iterations=torch.zeros(len(start), dtype=torch.int64, device=start.device),
        )

    @classmethod
    def concatenate(cls, parts: Sequence[FixedPoints]) -> FixedPoints:
        """Put the results of several batches one after the other."""
        return cls(*(torch.cat([getattr(part, name) for part in parts]) for name in cls.__annotations__))

    def merge_pass(self, rows: Tensor, later: FixedPoints) -> None:
        """Take the rows that a later pass improved, in place; its iterations are added for all its rows.

        A row that converged is better than one that did not; of two equal ones the smaller residual is better.
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
    """An iterate of some rows, to which a scheme adds its own memory: one row per row in all of its tensors.

    Attributes:
        x: The unknowns. [b, d]
        residual: The size of the residual at x. [b]
    """

    x: Tensor
    residual: Tensor

    def select(self, rows: Tensor) -> Self:
        """Return the state of some rows alone, given by a mask [b]."""
        part = copy(self)
        for name, value in vars(self).items():
            if isinstance(value, Tensor) and len(value) == len(rows):
                setattr(part, name, value[rows])
        return part


S = TypeVar("S", bound=State)


class Scheme(ABC):
    """A way to iterate: one iteration, or several that take turns.

    Attributes:
        first_try: After how many iterations continuation helps a row that has not converged more than iterations do.
        stage_iterations: The most iterations on one stage of a continuation.
        uses_corrections: Whether it uses an equation's Newton corrections (else: its images).
    """

    first_try: int
    stage_iterations: int
    uses_corrections: bool = False

    @abstractmethod
    def phases(self, maximum: int) -> Iterator[tuple[Iteration, int]]:
        """Yield the iterations that take turns on the rows that are left, each with its most steps."""

    def for_hard_rows(self) -> Scheme:
        """Return the scheme for rows that resisted the first try."""
        return self


class Iteration(Scheme, Generic[S]):
    """A step function: `init` evaluates the equation at the start, `step` goes from one iterate to the next.

    Attributes:
        compact: Rows that ended leave the batch when the share of the others falls below this number.
    """

    compact: float = 1.0

    @abstractmethod
    def init(self, equation: Equation, x: Tensor, z: Tensor, index: Tensor, tolerance: float) -> S:
        """Return the state of the first iteration."""

    @abstractmethod
    def step(self, equation: Equation, state: S, z: Tensor, index: Tensor, tolerance: float) -> S:
        """Return the state of the next iteration."""

    def terminate(self, state: S, tolerance: float) -> Tensor:
        """Return which rows end here. [b]"""
        return state.residual <= tolerance

    def phases(self, maximum: int) -> Iterator[tuple[Iteration, int]]:
        yield self, maximum


@dataclass(frozen=True)
class Options:
    """How an equation is solved.

    Attributes:
        scheme: How to iterate.
        tolerance: A row has converged when its residual is below this number.
        maximum: The most iterations of a row; of a scheme whose phases alternate, the most images.
    """

    scheme: Scheme
    tolerance: float
    maximum: int

    @property
    def rough(self) -> Options:
        """The options of a stage that only starts the next one."""
        return Options(self.scheme, _STAGE_TOLERANCE, self.scheme.stage_iterations)


def solve(equation: Equation, z: Tensor, start: Tensor, options: Options, index: Tensor | None = None) -> FixedPoints:
    """Iterate all rows from `start` [B, d], each until it has converged.

    Args:
        equation: The equation.
        z: The rows' points. [B]
        start: Their first iterates. [B, d]
        options: How to iterate, and how long.
        index: The rows' numbers in the equation's batch; all rows in order by default. [B]
    """
    index = torch.arange(len(z), device=z.device) if index is None else index
    result = FixedPoints.unsolved(start)
    left = torch.arange(len(z), device=z.device)
    for phase, limit in options.scheme.phases(options.maximum):
        passed = _iterate(equation, z[left], result.x[left], phase, options.tolerance, limit, index[left])
        result.merge_pass(left, passed)
        left = result.unconverged()
        if len(left) == 0:
            break
    return result


def _iterate(
    equation: Equation, z: Tensor, start: Tensor, scheme: Iteration, tolerance: float, maximum: int, index: Tensor
) -> FixedPoints:
    """Run one scheme; each row returns its iterate of smallest residual."""
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


def lead_down(equation: Equation, z: Tensor, options: Options, *, top: float | Tensor) -> FixedPoints:
    """Solve an equation at all points z [B] at once: down from a large height in stages, then to the tolerance.

    Every transform here is known at a large height and analytic in the upper half-plane, so that the solution keeps its
    branch on the way down. Rows that did not converge are led down again in smaller stages.

    Note:
        The paper's continuation runs along the grid, one point after the other. This one runs down to all points of the
        grid at once: it takes as many steps for one point as for a thousand, and a GPU solves them side by side.

    Args:
        equation: The equation.
        z: Points of the upper half-plane. [B]
        options: How to iterate; `maximum` is the most iterations of the last stage.
        top: A height at which `equation.start` is good; one for all points, or one for each [B].
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
    """Solve an equation at points z [B] from its solutions x [B, d] at points `known` [B], in steps between them.

    The steps lie on straight lines of log z, in which the unknowns are analytic. Each begins where the slope of the
    step before it leads; after one that fails the next is half as long, after one that succeeds twice.
    """
    result = FixedPoints.unsolved(x)
    x, slope = x.clone(), torch.zeros_like(x)
    done = torch.zeros_like(z.real)  # the share of the way that has been gone
    step = torch.full_like(done, _FIRST_STEP)
    left = torch.arange(len(z), device=z.device)
    for _ in range(_STEPS):
        last = done[left] + step[left] >= 1
        for rows, stage_options in ((left[~last], options.rough), (left[last], options)):
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
