"""The schemes: plain iteration, Anderson mixing, Newton's method, and Anderson mixing followed by Newton's method.

The fields of a scheme are its options. `fixed_point.solve` runs a scheme.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Self

import torch
from torch import Tensor

from jpmhc.spectra.fixed_point import Equation, Iteration, Scheme, State

# Ridge of the normalised normal equations. Their condition is the square of the history's condition, so that 1e-14 is
# of the order of rounding.
_RIDGE = 1e-14
# A smallest residual counts as progress only if it is below this fraction of the one before.
_IMPROVED = 0.9
# If g(x) does not exist because rounding made a matrix singular, the next iterate is this multiple of x.
_NUDGE = 1.01
# `Equation.rounding` evaluates two images: it is called once in this many iterations.
_ROUNDING_EVERY = 10
_TINY = torch.finfo(torch.float64).tiny


@dataclass
class _Images(State):
    """The state of the plain iteration: x, its residual, and g(x)."""

    image: Tensor


@dataclass(frozen=True)
class Plain(Iteration[_Images]):
    r"""The damped iteration $x \leftarrow (1 - \beta) x + \beta g(x)$, a slow scheme to compare other schemes with.

    Attributes:
        step_length: $\beta$, which is one for an undamped step.

    >>> Plain(step_length=0.5).first_try
    200
    """

    step_length: float = 0.5
    first_try: int = 200
    stage_iterations: int = 200

    def init(self, equation: Equation, x: Tensor, z: Tensor, index: Tensor, tolerance: float) -> _Images:
        image = equation.image(x, z, index)
        return _Images(x, ((image - x).abs() / equation.scale(x, z, index)).amax(-1).nan_to_num(nan=torch.inf), image)

    def step(self, equation: Equation, state: _Images, z: Tensor, index: Tensor, tolerance: float) -> _Images:
        return self.init(equation, equation.between(state.x, state.image, self.step_length), z, index, tolerance)


@dataclass(frozen=True)
class Anderson(Iteration["_Mixing"]):
    r"""Anderson mixing: an iteration of x = g(x) that extrapolates from the last iterates.

    The next iterate is $\sum_i c_i g(x_i)$ over the last iterates, with the coefficients $c_i$ that minimise
    $\|\sum_i c_i r_i\|^2$ for $r_i = g(x_i) - x_i$ under $\sum_i c_i = 1$ (appendix "Anderson/DIIS acceleration"). If
    this point is not finite or not admissible, the next iterate is $(1-\beta) x + \beta g(x)$ instead.

    Attributes:
        history: The number of stored differences of iterates, 5 as in the paper.
        long_history: The largest number of stored differences after `grows_after` iterations; more than `history` are
            stored only up to half the number of unknowns. A short history is too short if g(x) - x hardly changes along
            many directions. This happens for z near zero if the density is unbounded there, and for networks of many
            layers with much noise.
        grows_after: The number of iterations after which the history grows.
        step_length: The $\beta$ of the step to $(1-\beta) x + \beta g(x)$; one for an undamped step.
        patience: The iteration of a point stops without convergence when the point's smallest residual has not fallen
            by a tenth in this many iterations.

    >>> Anderson(history=10).history
    10
    """

    history: int = 5
    long_history: int = 30
    grows_after: int = 30
    step_length: float = 0.5
    patience: int = 60
    first_try: int = 150
    stage_iterations: int = 50
    compact: float = 0.75  # copying the history each time a row ends would take more time than it saves

    def for_hard_rows(self) -> Anderson:
        """Return the scheme that stores `long_history` differences from the first iteration on."""
        return replace(self, history=self.long_history)

    def init(self, equation: Equation, x: Tensor, z: Tensor, index: Tensor, tolerance: float) -> _Mixing:
        # As many differences as unknowns would leave the least squares without a unique answer near convergence.
        most = max(self.history, min(self.long_history, x.shape[-1] // 2))
        worst = torch.full((len(x),), torch.inf, dtype=torch.float64, device=x.device)
        state = _Mixing(x, worst, _History(x, most), best=worst, since=torch.zeros_like(worst, dtype=torch.int64))
        state.evaluate(equation, z, index, tolerance)
        return state

    def step(self, equation: Equation, state: _Mixing, z: Tensor, index: Tensor, tolerance: float) -> _Mixing:
        length = self.history if state.count < self.grows_after else state.past.most
        state.past.remember(state.difference, state.image, state.weight, length)
        x = equation.between(state.x, state.image, self.step_length)
        x = torch.where(torch.isfinite(state.image).all(-1, keepdim=True), x, _NUDGE * state.x)
        if state.past.used:
            candidate = equation.clamp(state.past.mix(state.difference * state.weight, state.image))
            good = torch.isfinite(candidate).all(-1) & equation.admissible(candidate, z, index)
            x = torch.where(good.unsqueeze(-1), candidate, x)
        state.x = x
        state.evaluate(equation, z, index, tolerance)
        return state

    def terminate(self, state: _Mixing, tolerance: float) -> Tensor:
        return (state.residual <= tolerance) | (state.since >= self.patience)


@dataclass
class _Mixing(State):
    """The state of Anderson mixing.

    Attributes:
        best: The smallest residual so far; a fall by less than a tenth does not count. [b]
        since: The number of iterations since `best` last changed. [b]
        rounding: The last result of `Equation.rounding`, which is added to the scale; None if there is none. [b, d]
        image: g(x). [b, d]
        difference: g(x) - x. [b, d]
        weight: One over the scale of differences. [b, d] or [1, 1]
    """

    past: _History
    best: Tensor
    since: Tensor
    count: int = 0
    rounding: Tensor | None = None
    image: Tensor = field(init=False)
    difference: Tensor = field(init=False)
    weight: Tensor = field(init=False)

    def select(self, rows: Tensor) -> Self:
        part = super().select(rows)
        part.past = self.past.select(rows)
        return part

    def evaluate(self, equation: Equation, z: Tensor, index: Tensor, tolerance: float) -> None:
        """Compute all fields that depend on x, in place: its image, residual and weights, and the progress."""
        self.count += 1
        self.image = equation.image(self.x, z, index)
        self.difference = self.image - self.x
        if self.count % _ROUNDING_EVERY == 0:
            self.rounding = equation.rounding(self.x, z, index)
        scale = equation.scale(self.x, z, index)
        self.weight = 1 / (scale if self.rounding is None else scale + self.rounding)
        if self.rounding is not None:
            # Rounding errors differ between iterations: they are computed again for rows that seem to have converged.
            small = ((self.difference.abs() * self.weight).amax(-1) <= tolerance).nonzero().squeeze(-1)
            if len(small):
                now = equation.rounding(self.x[small], z[small], index[small])
                assert now is not None
                self.rounding[small], self.weight[small] = now, 1 / (scale[small] + now)
        self.residual = (self.difference.abs() * self.weight).amax(-1).nan_to_num(nan=torch.inf)
        improved = self.residual < _IMPROVED * self.best
        self.best = torch.where(improved, self.residual, self.best)
        self.since = torch.where(improved, 0, self.since + 1)


class _History:
    """The last differences of residuals and of images between iterates, for Anderson mixing.

    The residuals r = g(x) - x are weighted. Each difference of r or of the images g is divided by the length of the
    difference of r. The Gram matrix of the differences of r is stored too.

    Args:
        like: An iterate of all rows. [b, d]
        most: The largest number of stored differences.
    """

    def __init__(self, like: Tensor, most: int) -> None:
        self.r, self.g = (like.new_empty(len(like), most, like.shape[-1]) for _ in range(2))
        self.gram = like.new_empty(len(like), most, most)
        self.most, self.used, self.newest = most, 0, 0
        self.last: tuple[Tensor, Tensor] | None = None  # r, without weights, and g

    def select(self, rows: Tensor) -> _History:
        """Keep only the rows that a mask [b] selects, in place."""
        self.r, self.g, self.gram = self.r[rows], self.g[rows], self.gram[rows]
        if self.last is not None:
            self.last = self.last[0][rows], self.last[1][rows]
        return self

    def remember(self, r: Tensor, g: Tensor, weight: Tensor, length: int) -> None:
        """Store the changes of r and g [b, d] since the last call; replace the oldest if `length` are stored.

        `weight` [b, d] or [1, 1] multiplies the change of r.
        """
        last, self.last = self.last, (r, g)
        if last is None:
            return
        dr, dg = r - last[0], g - last[1]
        known = (torch.isfinite(dr) & torch.isfinite(dg)).all(-1, keepdim=True)
        dr, dg = torch.where(known, dr, 0.0) * weight, torch.where(known, dg, 0.0)
        if self.used < length:
            self.newest, self.used = self.used, self.used + 1
        else:
            self.newest = (self.newest + 1) % length
        norm = torch.linalg.vector_norm(dr, dim=-1, keepdim=True).clamp_min(_TINY)
        self.r[:, self.newest], self.g[:, self.newest] = dr / norm, dg / norm
        row = (self.r[:, : self.used].conj() @ self.r[:, self.newest].unsqueeze(-1)).squeeze(-1)
        self.gram[:, : self.used, self.newest] = row
        self.gram[:, self.newest, : self.used] = row.conj()

    def mix(self, r: Tensor, g: Tensor) -> Tensor:
        r"""Return the extrapolated iterate $g - \Delta G\,\gamma$, $\gamma = \arg\min \|r - \Delta R\,\gamma\|$. [b, d]

        ΔR and ΔG are the stored differences, and r is the weighted residual.
        """
        past_r, past_g = self.r[:, : self.used], self.g[:, : self.used]
        eye = torch.eye(self.used, dtype=r.dtype, device=r.device)
        gram = self.gram[:, : self.used, : self.used] + _RIDGE * eye
        gamma, _ = torch.linalg.solve_ex(gram, past_r.conj() @ r.unsqueeze(-1))
        return g - (gamma.transpose(-1, -2) @ past_g).squeeze(-2)


@dataclass
class _Corrections(State):
    """The state of Newton's method: x, the residual, the next correction, and a mask of the rows that just moved."""

    correction: Tensor
    moved: Tensor


@dataclass(frozen=True)
class Newton(Iteration[_Corrections]):
    """Newton's method with Armijo backtracking.

    If no step length improves a row, the row moves to `Equation.safe_image`; if that is None, the row ends unconverged.

    Attributes:
        lengths: The step lengths, tried in turn (appendix "Newton iteration"); a row takes the first length that leads
            to an admissible point with a smaller residual.
        stubborn: Whether a row that no length improves takes the shortest step nevertheless. This helps if g(x) - x
            hardly changes along one direction: the residual must then first grow on the way to the solution.

    >>> Newton(lengths=(1.0, 0.1)).lengths
    (1.0, 0.1)
    """

    lengths: tuple[float, ...] = (1.0, 0.5, 0.25, 0.125)
    stubborn: bool = False
    first_try: int = 30
    stage_iterations: int = 20
    uses_corrections: bool = True

    def init(self, equation: Equation, x: Tensor, z: Tensor, index: Tensor, tolerance: float) -> _Corrections:
        size, correction = equation.newton_correction(x, z, index)
        return _Corrections(x, size.nan_to_num(nan=torch.inf), correction, torch.ones_like(size, dtype=torch.bool))

    def step(self, equation: Equation, state: _Corrections, z: Tensor, index: Tensor, tolerance: float) -> _Corrections:
        new = _Corrections(
            state.x.clone(), state.residual.clone(), state.correction.clone(), torch.zeros_like(state.moved)
        )

        def move(rows: Tensor, x: Tensor, size: Tensor, correction: Tensor) -> None:
            new.x[rows], new.residual[rows], new.correction[rows] = x, size.nan_to_num(nan=torch.inf), correction
            new.moved[rows] = True

        for length in self.lengths:
            rows = (~new.moved).nonzero().squeeze(-1)
            if len(rows) == 0:
                return new
            x = equation.clamp(state.x[rows] + length * state.correction[rows])
            size, correction = equation.newton_correction(x, z[rows], index[rows])
            good = torch.isfinite(x).all(-1) & equation.admissible(x, z[rows], index[rows])
            if not self.stubborn or length != self.lengths[-1]:
                # The Armijo constant is small, as usual: any decrease beyond rounding is enough.
                good &= size <= (1 - 1e-4 * length) * state.residual[rows]
            move(rows[good], x[good], size[good], correction[good])
        stuck = (~new.moved).nonzero().squeeze(-1)
        safe = equation.safe_image(state.x[stuck], z[stuck], index[stuck]) if len(stuck) else None
        if safe is not None:
            move(stuck, safe, *equation.newton_correction(safe, z[stuck], index[stuck]))
        return new

    def terminate(self, state: _Corrections, tolerance: float) -> Tensor:
        return (state.residual <= tolerance) | ~state.moved


@dataclass(frozen=True)
class AndersonNewton(Scheme):
    """Anderson mixing until the iterate is near a solution, followed by Newton's method.

    The scheme suits equations whose Newton correction takes no more time than a few images g(x). If such an equation is
    nearly neutral in many directions (g(x) - x hardly changes along them), the last digits take hundreds of images by
    mixing, but three or four Newton corrections.

    Attributes:
        turns: The number of images in each turn of mixing before a turn of Newton's method.
        corrections: The most Newton corrections in one turn.

    >>> [limit for _, limit in AndersonNewton().phases(100)]
    [12, 12, 40, 12, 48]
    """

    mixing: Anderson = field(default_factory=Anderson)
    newton: Newton = field(default_factory=Newton)
    turns: tuple[int, ...] = (12, 40)
    corrections: int = 12
    first_try: int = 150
    stage_iterations: int = 50
    uses_corrections: bool = True

    def for_hard_rows(self) -> AndersonNewton:
        """Return the scheme whose mixing stores `Anderson.long_history` differences from the first iteration on."""
        return replace(self, mixing=self.mixing.for_hard_rows())

    def phases(self, maximum: int) -> Iterator[tuple[Iteration, int]]:
        for length in self.turns:
            if length >= maximum:
                break
            yield self.mixing, length
            yield self.newton, self.corrections
            maximum -= length
        yield self.mixing, maximum


SCHEMES: dict[str, Scheme] = {
    "anderson": Anderson(),
    "newton": Newton(),
    "anderson_newton": AndersonNewton(),
    "plain": Plain(),
}
