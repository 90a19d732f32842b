"""The interface that all methods share: arguments, options, and the solution with its convergence."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from jpmhc import checks
from jpmhc.machine import ran_out_of_memory, use_threads
from jpmhc.spectra.arguments import check_points
from jpmhc.spectra.fixed_point import Options, Scheme
from jpmhc.spectra.network import Network, require_network
from jpmhc.spectra.schemes import SCHEMES

# A known point farther away than this, in the logarithm of z, is no better start than the equation's own.
_NEAR = 2.5
# An extrapolation goes no farther than this many times the distance between the points that give the slope.
_FARTHEST = 2.0


@dataclass(frozen=True, eq=False)
class KnownPoints:
    """Solved spectral points of a network, from which the network's equation can be solved at other points.

    Attributes:
        z: The points. [B]
        unknowns: The solution at each point: G first, then the equation's unknowns. [B, d]
        separated: Whether the unknowns belong to bases that separate directions by their growth (chain/bases.py).
        call: The number, from 0, of the call of the solver that solved each point; None if one call solved all. [B]
    """

    z: Tensor
    unknowns: Tensor
    separated: bool = False
    call: Tensor | None = None

    @classmethod
    def concatenate(cls, parts: list[KnownPoints]) -> KnownPoints:
        """Return the points of all parts as one.

        Points in separated bases cannot be joined with other points: the kind that has fewer points is dropped.
        """
        kinds = [[part for part in parts if part.separated == separated] for separated in (False, True)]
        same = max(kinds, key=lambda kind: sum(len(part.z) for part in kind))
        calls, count = [], 0
        for part in same:
            calls.append(count + part.calls())
            count = int(calls[-1].max()) + 1
        points, unknowns = (torch.cat([getattr(part, name) for part in same]) for name in ("z", "unknowns"))
        return cls(points, unknowns, same[0].separated, torch.cat(calls))

    def calls(self) -> Tensor:
        """Return the attribute `call`, or zeros if it is None. [B]"""
        return torch.zeros_like(self.z.real, dtype=torch.int64) if self.call is None else self.call

    def start_near(self, z: Tensor, start: Tensor, admissible: Callable[[Tensor], Tensor]) -> Tensor:
        """Return starts at z [b], extrapolated from known points, or the rows of `start` where none is near. [b, d]

        The unknowns are analytic in log z: they are extrapolated from the nearest known point with the slope between
        this point's two neighbours. If the result is not admissible, the nearest point's own unknowns are returned.
        """
        order = self.z.abs().argsort()
        order = order[self.calls()[order].argsort(stable=True)]
        log, unknowns, call = self.z.log()[order], self.unknowns[order], self.calls()[order]
        distance, nearest = (z.log().unsqueeze(-1) - log).abs().min(-1)
        before, after = (nearest - 1).clamp_min(0), (nearest + 1).clamp_max(len(log) - 1)
        before, after = (torch.where(call[side] == call[nearest], side, nearest) for side in (before, after))
        step = ((z.log() - log[nearest]) / (log[after] - log[before])).unsqueeze(-1)
        guess = unknowns[nearest] + step * (unknowns[after] - unknowns[before])
        good = torch.isfinite(guess).all(-1) & (step.abs().squeeze(-1) < _FARTHEST)
        good[good.clone()] = admissible(guess[good])
        near = torch.where(good.unsqueeze(-1), guess, unknowns[nearest])
        return torch.where(distance.unsqueeze(-1) < _NEAR, near, start)


@dataclass(frozen=True, eq=False)
class Solution:
    r"""The Cauchy transform $G(z) = \lim \frac{1}{N} \mathrm{Tr}(z - J^\top J)^{-1}$ of a network's N × N Jacobian J.

    Attributes:
        G: The values; if `converged` is false, the value is only the last iterate and no answer. [...] complex
        converged: Whether the point's residual fell below the tolerance. [...] bool
        residual: The size of the residual of the method's equation. [...]
        iterations: The number of iterations. [...] int
        method: The method's name.
        exact: Whether the method's equation is exact for this network (in the limit of many features per stream).
        note: A remark for the user, such as the reason why the method is not exact.
        matrix: If requested, $E[(z - J^\top J)^{-1}]$ averaged over the features: entry (i, j) belongs to the input
            streams i and j, and G is the mean of the diagonal. [..., n, n] complex
        known: The solved points, from which a later call of `cauchy` starts; None for the paper's methods.
        hardest_layer: For `spectra.cauchy`, the number, from one, of the layer with the largest residual at an
            unconverged point; zero at a converged point. None if the method has no such number. [...] int

    >>> from jpmhc import spectra
    >>> solution = spectra.cauchy(Network.repeated(torch.eye(2), 0.1, 3), torch.tensor([1 + 0.1j]))
    >>> solution.method, solution.exact, solution.converged.tolist()
    ('chain', True, [True])
    """

    G: Tensor
    converged: Tensor
    residual: Tensor
    iterations: Tensor
    method: str
    exact: bool = True
    note: str = ""
    matrix: Tensor | None = None
    known: KnownPoints | None = field(default=None, repr=False)
    hardest_layer: Tensor | None = None

    def why_unconverged(self) -> str:
        """Return a sentence with the number of unconverged points and their largest residual.

        If `hardest_layer` is not None, the sentence also names the layer that is the hardest most often.
        """
        lost = ~self.converged
        worst = float(self.residual[lost].max())
        text = f"{int(lost.sum())} of {lost.numel()} points did not converge (residual up to {worst:.1e})"
        if self.hardest_layer is None:
            return text
        return f"{text}; layer {int(self.hardest_layer[lost].mode().values)} makes it hard"

    @classmethod
    def concatenate(cls, parts: list[Solution]) -> Solution:
        """Return solutions of one network by one method, each at points [b], as one solution."""
        known = [part.known for part in parts if part.known is not None]
        joined: dict[str, Any] = {
            name: torch.cat([getattr(part, name) for part in parts]) for name in parts[0].per_point()
        }
        return replace(parts[0], known=KnownPoints.concatenate(known) if known else None, **joined)

    def per_point(self) -> dict[str, Tensor]:
        """Return, by name, the attributes that have one entry per point."""
        names = ("G", "converged", "residual", "iterations", "matrix", "hardest_layer")
        return {name: getattr(self, name) for name in names if getattr(self, name) is not None}


class Transform(Protocol):
    """A function that computes a network's Cauchy transform and has the arguments of `cauchy`.

    >>> from jpmhc import paper, spectra
    >>> transforms: list[Transform] = [spectra.cauchy, paper.transform("z1")]
    """

    def __call__(
        self,
        network: Network,
        z: Tensor,
        *,
        tolerance: float | None = None,
        maximum: int | None = None,
        near: Solution | None = None,
    ) -> Solution: ...


@dataclass(frozen=True)
class Method:
    """A `Transform` by one of the paper's methods, which start every point anew and ignore the argument `near`.

    Attributes:
        solve_row: The function that solves a row of points z [B].
        defaults: The options of a call that does not give its own.
    """

    solve_row: Callable[[Network, Tensor, Options], Solution]
    defaults: Options

    def __call__(
        self,
        network: Network,
        z: Tensor,
        *,
        tolerance: float | None = None,
        maximum: int | None = None,
        scheme: str | Scheme | None = None,
        near: Solution | None = None,
    ) -> Solution:
        options = to_options(self.defaults, tolerance, maximum, scheme)
        return solve_points(lambda points: self.solve_row(network, points, options), network, z)


def method(
    *, scheme: Scheme, tolerance: float, maximum: int
) -> Callable[[Callable[[Network, Tensor, Options], Solution]], Method]:
    """Return a decorator that turns a function of points z [B] into a `Method` with the given default options."""
    return lambda solve_row: Method(solve_row, Options(scheme, tolerance, maximum))


def to_options(defaults: Options, tolerance: float | None, maximum: int | None, scheme: str | Scheme | None) -> Options:
    """Check the arguments, and return `defaults` with every other argument that is not None in place of its default."""
    if isinstance(scheme, str):
        checks.choice(scheme, SCHEMES, "scheme")
        scheme = SCHEMES[scheme]
    return Options(
        defaults.scheme if scheme is None else scheme,
        defaults.tolerance if tolerance is None else checks.positive_number(tolerance, "the tolerance"),
        defaults.maximum if maximum is None else checks.whole_number(maximum, "the number of iterations"),
    )


def solve_points(solve: Callable[[Tensor], Solution], network: Network, z: Tensor) -> Solution:
    """Check a network and its points z, and return the solution of `solve` in the shape of z."""
    require_network(network)
    points = check_points(z, network.skips.device)
    with torch.no_grad(), use_threads(1):
        row = _solve_in_parts(solve, points.reshape(-1))
    shaped: dict[str, Any] = {
        name: value.reshape((*points.shape, *value.shape[1:])) for name, value in row.per_point().items()
    }
    return replace(row, **shaped)


def _solve_in_parts(solve: Callable[[Tensor], Solution], z: Tensor) -> Solution:
    """Solve at points z [B]; if memory runs out, solve the two halves one after the other (appendix "GPU")."""
    try:
        return solve(z)
    except RuntimeError as error:
        if len(z) == 1 or not ran_out_of_memory(error):
            raise
    # Outside the handler, because its traceback would keep the tensors in memory.
    return Solution.concatenate([_solve_in_parts(solve, part) for part in z.chunk(2)])
