"""Anderson mixing to come near a solution, and Newton's method from there."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from jpmhc.spectra.chain.fixed_point.anderson import Anderson
from jpmhc.spectra.chain.fixed_point.contract import FixedPoints, Problem
from jpmhc.spectra.chain.fixed_point.newton import Newton


@dataclass(frozen=True)
class AndersonNewton:
    """Anderson mixing for some iterations, Newton's method, and mixing again where that did not end.

    For equations whose Newton corrections cost a few images: where an equation is neutral in many directions, mixing
    takes hundreds of images to the last digits, and Newton three or four corrections.

    Attributes:
        mixing: The scheme that comes near.
        newton: The scheme that ends.
        turns: After how many images each turn of mixing gives way to Newton.
        corrections: The most Newton corrections of one turn.
    """

    mixing: Anderson = field(default_factory=Anderson)
    newton: Newton = field(default_factory=Newton)
    turns: tuple[int, ...] = (12, 40)
    corrections: int = 12
    first_try: int = 150
    stage_iterations: int = 50
    uses_corrections: bool = True

    def for_hard_rows(self) -> AndersonNewton:
        """Return the scheme whose mixing has the long history from the beginning."""
        return replace(self, mixing=self.mixing.for_hard_rows())

    def with_shorter_steps(self, factor: float) -> AndersonNewton:
        """Return the scheme with plain steps shorter by a factor."""
        return replace(self, mixing=self.mixing.with_shorter_steps(factor))

    def solve(self, problem: Problem, start: Tensor, tolerance: float, maximum: int) -> FixedPoints:
        """Solve all rows, in turns of both schemes; `maximum` is that of the images."""
        result, spent = FixedPoints.unsolved(start), 0
        left = torch.arange(len(start), device=start.device)
        for turn in (*self.turns, maximum):
            count = min(turn, maximum - spent)
            if count <= 0 or len(left) == 0:
                break
            result.merge_pass(left, self.mixing.solve(problem.select(left), result.x[left], tolerance, count))
            left, spent = result.unconverged(), spent + count
            if spent < maximum and len(left):
                ended = self.newton.solve(problem.select(left), result.x[left], tolerance, self.corrections)
                result.merge_pass(left, ended)
                left = result.unconverged()
        return result
