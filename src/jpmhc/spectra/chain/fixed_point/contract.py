"""What every scheme solves and returns: a batch of small systems of equations, and where their iterations ended."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

# What a scheme that iterates images is told of an equation that has none.
NO_IMAGE = "this method's equation is given by its Newton corrections alone; use the scheme 'newton'"


@dataclass(frozen=True, eq=False)
class FixedPoints:
    """Where the iterations of a batch of problems ended.

    Attributes:
        x: The unknowns. [B, d]
        converged: Whether the residual fell below the tolerance at an admissible x. [B]
        residual: How far x is from solving its equation, as the scheme measures it. [B]
        iterations: How many iterations the problem took. [B]
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
        """Take over what a later pass over some rows improved, in place; its iterations are added in any case.

        A row that converged is better than one that did not; of two equal ones the smaller residual is better.
        """
        smaller = later.residual < self.residual[rows]
        better = (later.converged & ~self.converged[rows]) | (smaller & (later.converged | ~self.converged[rows]))
        place = rows[better]
        self.x[place], self.residual[place] = later.x[better], later.residual[better]
        self.converged[place] = later.converged[better]
        self.iterations[rows] += later.iterations

    def unconverged(self) -> Tensor:
        """Return the places of the rows that have not converged."""
        return (~self.converged).nonzero().squeeze(-1)


class Problem:
    """A batch of independent systems of equations of one size, given as fixed points x = g(x) or by Newton corrections.

    Every method gets the rows that are still being solved, x [b, d], and their places in the batch, index [b].
    Anderson mixing and the plain iteration use `image`; Newton uses `newton_correction`.
    """

    def select(self, rows: Tensor) -> Problem:
        """Return the problem of some of the rows alone."""
        return _SomeRows(self, rows)

    def image(self, x: Tensor, index: Tensor) -> Tensor:
        """Return g(x). [b, d]"""
        raise ValueError(NO_IMAGE)

    def newton_correction(self, x: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
        """Return the residual's size [b] and what Newton adds to x [b, d]; by differences of g unless overridden."""
        residual = self.image(x, index) - x
        width = 1e-7 * x.abs().clamp_min(1.0)  # [b, d]
        columns = []
        for unknown in range(x.shape[-1]):
            moved = x.clone()
            moved[:, unknown] += width[:, unknown]
            change = self.image(moved, index) - moved - residual
            columns.append(change / width[:, unknown : unknown + 1])
        correction, _ = torch.linalg.solve_ex(torch.stack(columns, -1), -residual)
        return (residual.abs() / self.scale(x, index)).amax(-1), correction

    def safe_image(self, x: Tensor, index: Tensor) -> Tensor | None:
        """Return a point [b, d] that is never inadmissible, for rows that no Newton correction improves."""
        return None

    def between(self, x: Tensor, image: Tensor, share: float) -> Tensor:
        """Return a point [b, d] that lies a share of the way from x to g(x), and is admissible if they are."""
        return x + share * (image - x)

    def admissible(self, x: Tensor, index: Tensor) -> Tensor:
        """Return whether x lies where the solution must be. [b]"""
        return torch.ones(len(x), dtype=torch.bool, device=x.device)

    def scale(self, x: Tensor, index: Tensor) -> Tensor:
        """Return what a residual is measured against. [b, d], or [1, 1] for all"""
        return torch.ones(1, 1, dtype=torch.float64, device=x.device)

    def rounding(self, x: Tensor, index: Tensor) -> Tensor | None:
        """Return what is added to the scale for what rounding does to g(x) [b, d], if that may be much."""
        return None

    def clamp(self, x: Tensor) -> Tensor:
        """Return the point nearest to x that lies where the solution must be, for equations that know it."""
        return x

    def converged(self, x: Tensor, index: Tensor, residual: Tensor, tolerance: float) -> Tensor:
        """Return which rows have a residual within the tolerance at an admissible x. [b]"""
        small = residual <= tolerance
        if bool(small.any()):
            small[small.clone()] = self.admissible(x[small], index[small])
        return small


class _SomeRows(Problem):
    """Some rows of a problem, which is asked with their places in its own batch."""

    def __init__(self, problem: Problem, rows: Tensor) -> None:
        self.problem, self.rows = problem, rows

    def image(self, x: Tensor, index: Tensor) -> Tensor:
        return self.problem.image(x, self.rows[index])

    def newton_correction(self, x: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
        return self.problem.newton_correction(x, self.rows[index])

    def safe_image(self, x: Tensor, index: Tensor) -> Tensor | None:
        return self.problem.safe_image(x, self.rows[index])

    def between(self, x: Tensor, image: Tensor, share: float) -> Tensor:
        return self.problem.between(x, image, share)

    def admissible(self, x: Tensor, index: Tensor) -> Tensor:
        return self.problem.admissible(x, self.rows[index])

    def scale(self, x: Tensor, index: Tensor) -> Tensor:
        return self.problem.scale(x, self.rows[index])

    def rounding(self, x: Tensor, index: Tensor) -> Tensor | None:
        return self.problem.rounding(x, self.rows[index])

    def clamp(self, x: Tensor) -> Tensor:
        return self.problem.clamp(x)


class Scheme(Protocol):
    """A way to iterate a batch of problems, each row stopping when it has converged; its options are its fields.

    Attributes:
        first_try: After how many iterations a row that has not converged is better led there by continuation.
        stage_iterations: The most iterations on one stage of a continuation.
        uses_corrections: Whether it uses a problem's Newton corrections (else: its images).
    """

    @property
    def first_try(self) -> int: ...

    @property
    def stage_iterations(self) -> int: ...

    @property
    def uses_corrections(self) -> bool: ...

    def solve(self, problem: Problem, start: Tensor, tolerance: float, maximum: int) -> FixedPoints:
        """Iterate from `start` [B, d] until every row's residual is below the tolerance, or `maximum` times."""

    def for_hard_rows(self) -> Scheme:
        """Return the scheme for rows that resisted the first try."""

    def with_shorter_steps(self, factor: float) -> Scheme:
        """Return the scheme with plain steps shorter by a factor."""
