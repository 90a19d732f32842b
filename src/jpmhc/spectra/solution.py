"""What every method returns: the Cauchy transform at the points asked, and how far to trust each of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

# Known points farther away than this, in the logarithm of z, are no better than a start from nothing.
_NEAR = 2.5
# A slope is not followed farther than this many times the distance it was taken over.
_FARTHEST = 2.0


@dataclass(frozen=True, eq=False)
class KnownPoints:
    """Spectral points at which a network has been solved, from which its equation can be solved elsewhere.

    Attributes:
        z: The points. [B]
        unknowns: What the method found at each of them: G first, then its equation's unknowns. [B, d]
        separated: Whether the unknowns belong to bases that separate directions by their growth.
        call: The number of the call that solved each point; None for one call. [B]
    """

    z: Tensor
    unknowns: Tensor
    separated: bool = False
    call: Tensor | None = None

    @classmethod
    def concatenate(cls, parts: list[KnownPoints]) -> KnownPoints:
        """Join points whose unknowns belong to the same bases: those of the larger number of points."""
        kinds = [[part for part in parts if part.separated == separated] for separated in (False, True)]
        same = max(kinds, key=lambda kind: sum(len(part.z) for part in kind))
        calls, count = [], 0
        for part in same:
            calls.append(count + part.calls())
            count = int(calls[-1].max()) + 1
        points, unknowns = (torch.cat([getattr(part, name) for part in same]) for name in ("z", "unknowns"))
        return cls(points, unknowns, same[0].separated, torch.cat(calls))

    def calls(self) -> Tensor:
        """Return the number of the call that solved each point. [B]"""
        return torch.zeros_like(self.z.real, dtype=torch.int64) if self.call is None else self.call

    def start_near(self, z: Tensor, start: Tensor, admissible: Callable[[Tensor], Tensor]) -> Tensor:
        """Return the unknowns to start from at z [b], and `start` [b, d] where no known point is near. [b, d]

        The unknowns are analytic in log z: their slope between the nearest point's neighbours leads from it to z in any
        direction. Where that is not admissible the nearest point's own unknowns are taken.
        """
        order = self.z.abs().argsort()
        order = order[self.calls()[order].argsort(stable=True)]
        log, unknowns, call = self.z.log()[order], self.unknowns[order], self.calls()[order]
        distance, nearest = (z.log().unsqueeze(-1) - log).abs().min(-1)
        before, after = (nearest - 1).clamp_min(0), (nearest + 1).clamp_max(len(log) - 1)
        before, after = (torch.where(call[side] == call[nearest], side, nearest) for side in (before, after))
        step = ((z.log() - log[nearest]) / (log[after] - log[before])).unsqueeze(-1)
        led = unknowns[nearest] + step * (unknowns[after] - unknowns[before])
        good = torch.isfinite(led).all(-1) & (step.abs().squeeze(-1) < _FARTHEST)
        good[good.clone()] = admissible(led[good])
        near = torch.where(good.unsqueeze(-1), led, unknowns[nearest])
        return torch.where(distance.unsqueeze(-1) < _NEAR, near, start)


@dataclass(frozen=True, eq=False)
class Solution:
    r"""The Cauchy transform $G(z) = \lim \frac{1}{N} \mathrm{Tr}(z - J^\top J)^{-1}$.

    Attributes:
        G: The values; where `converged` is false, the last iterate, never to be used as an answer. [...] complex
        converged: Whether the point's residual fell below the tolerance. [...] bool
        residual: What is left of the method's own equation at the point. [...]
        iterations: How many iterations the point took. [...] int
        method: The method's name in `solve.METHODS`.
        exact: Whether the method's equation is exact for this network (in the limit of many features per stream).
        note: What the user should know beyond the numbers, such as the case in which the method is not exact.
        matrix: $E[(z - J^\top J)^{-1}]$ averaged over the features alone, if asked: entry (i, j) belongs to the input
            streams i and j, and G is the mean of the diagonal. [..., n, n] complex
        known: What a later call of `cauchy` can start from, for methods that can.
        hardest_layer: Where a point did not converge, the number of the layer, from one, that is farthest from it, for
            methods that know; zero elsewhere. [...] int
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
        """Say how many points did not converge, how far they are from it, and which layer makes it hard."""
        lost = ~self.converged
        worst = float(self.residual[lost].max())
        text = f"{int(lost.sum())} of {lost.numel()} points did not converge (residual up to {worst:.1e})"
        if self.hardest_layer is None:
            return text
        return f"{text}; layer {int(self.hardest_layer[lost].mode().values)} makes it hard"

    @classmethod
    def concatenate(cls, parts: list[Solution]) -> Solution:
        """Join solutions of one method for one network at rows of points."""
        matrices = [part.matrix for part in parts if part.matrix is not None]
        layers = [part.hardest_layer for part in parts if part.hardest_layer is not None]
        known = [part.known for part in parts if part.known is not None]
        return replace(
            parts[0],
            G=torch.cat([part.G for part in parts]),
            converged=torch.cat([part.converged for part in parts]),
            residual=torch.cat([part.residual for part in parts]),
            iterations=torch.cat([part.iterations for part in parts]),
            matrix=torch.cat(matrices) if matrices else None,
            hardest_layer=torch.cat(layers) if layers else None,
            known=KnownPoints.concatenate(known) if known else None,
        )
