"""Batched fixed points: many independent problems of one size, each stopping when it has converged."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

# Below this share of rows still active the batch is compacted; compacting on every convergence would copy the history
# more often than it saves work.
_COMPACT = 0.75
# Ridge of the normalised normal equations: their condition is the square of the history's, so that 1e-14 is rounding.
_RIDGE = 1e-14
# What counts as progress of a row.
_IMPROVED = 0.9


@dataclass(frozen=True, eq=False)
class FixedPoints:
    """Where the iterations ended: x [B, d], converged [B], residual [B] (infinity norm of g(x) - x), iterations [B]."""

    x: Tensor
    converged: Tensor
    residual: Tensor
    iterations: Tensor


def anderson(
    step: Callable[[Tensor, Tensor], Tensor],
    start: Tensor,
    *,
    tolerance: float = 1e-9,
    maximum: int = 500,
    depth: int = 5,
    damping: float = 0.5,
    patience: int = 60,
    admissible: Callable[[Tensor, Tensor], Tensor] | None = None,
    scale: Callable[[Tensor, Tensor], Tensor] | None = None,
) -> FixedPoints:
    r"""Solve x = g(x) for a batch of problems by Anderson mixing with an active set.

    The accelerated point $\sum_i c_i g(x_i)$ minimises $\|\sum_i c_i r_i\|^2$ over the last `depth` + 1 iterates with
    $\sum_i c_i = 1$ and $r_i = g(x_i) - x_i$ (appendix "Anderson/DIIS acceleration"). A candidate that is not finite or
    not admissible is replaced by the damped plain step $(1-\beta) x + \beta g(x)$. Problems that have converged leave
    the batch, so that the rest of them costs what they alone cost.

    Args:
        step: g(x, index) for the rows still active: x [b, d] real or complex, index [b] their places in the batch.
        start: Where to start. [B, d]
        tolerance: A row has converged when max |g(x) - x| (divided by `scale`) is below it.
        maximum: The most evaluations of g per row.
        depth: How many differences are kept.
        damping: The $\beta$ of a plain step.
        patience: A row is given up when its smallest residual has not fallen by a tenth in so many evaluations.
        admissible: admissible(x, index) -> bool [b], such as "the imaginary part of the resolvent is negative".
        scale: scale(x, index) -> [b, d] or [b, 1]: what a residual is measured against; 1 by default.
    """
    result = FixedPoints(
        x=start.clone(),
        converged=torch.zeros(len(start), dtype=torch.bool, device=start.device),
        residual=torch.full((len(start),), torch.inf, dtype=torch.float64, device=start.device),
        iterations=torch.zeros(len(start), dtype=torch.int64, device=start.device),
    )
    index = torch.arange(len(start), device=start.device)
    x = start
    finished = torch.zeros_like(result.converged)
    best, since = result.residual.clone(), torch.zeros_like(result.iterations)
    history: list[tuple[Tensor, Tensor]] = []  # differences of r and of g, newest last, each [b, d]
    last_r, last_g = None, None
    for count in range(1, maximum + 1):
        if len(index) == 0:
            break
        g = step(x, index)
        r = g - x
        weight = None if scale is None else 1 / scale(x, index)
        size = r.abs() if weight is None else r.abs() * weight
        residual = size.amax(-1).nan_to_num(nan=torch.inf)
        active = ~finished[index]
        place = index[active]
        # A row keeps the x whose residual was measured: what is returned has the residual that is reported.
        result.x[place], result.residual[place] = x[active], residual[active]
        result.iterations[place] = count
        result.converged[place] = residual[active] <= tolerance
        improved = residual < _IMPROVED * best
        best, since = torch.where(improved, residual, best), torch.where(improved, 0, since + 1)
        active &= (residual > tolerance) & (since < patience)
        finished[index] = ~active
        alive = int(active.sum())
        if alive == 0 or count == maximum:
            break
        if alive < _COMPACT * len(index):
            index, x, g, r = index[active], x[active], g[active], r[active]
            best, since = best[active], since[active]
            weight = None if weight is None or len(weight) == 1 else weight[active]
            history = [(dr[active], dg[active]) for dr, dg in history]
            if last_r is not None and last_g is not None:
                last_r, last_g = last_r[active], last_g[active]
        if last_r is not None and last_g is not None:
            history = [*history, (r - last_r, g - last_g)][-depth:]
        last_r, last_g = r, g
        plain = x + damping * r
        candidate = _mix(r, g, history, weight) if history else plain
        good = torch.isfinite(candidate).all(-1)
        if admissible is not None:
            good &= admissible(candidate, index)
        x = torch.where(good.unsqueeze(-1), candidate, plain)
    return result


def _mix(r: Tensor, g: Tensor, history: list[tuple[Tensor, Tensor]], weight: Tensor | None) -> Tensor:
    r"""$g - \Delta G\,\gamma$ with $\gamma = \arg\min \|r - \Delta R\,\gamma\|$, by normalised normal equations."""
    dr = torch.stack([pair[0] for pair in history], 1)  # [b, m, d]
    if weight is not None:
        dr, r = dr * weight.unsqueeze(1), r * weight
    dg = torch.stack([pair[1] for pair in history], 1)
    tiny = torch.finfo(torch.float64).tiny
    norm = torch.linalg.vector_norm(dr, dim=-1, keepdim=True).clamp_min(tiny)
    dr, dg = dr / norm, dg / norm
    adjoint = dr.conj()
    gram = adjoint @ dr.transpose(-1, -2)  # [b, m, m]
    gram = gram + _RIDGE * torch.eye(gram.shape[-1], dtype=gram.dtype, device=gram.device)
    gamma, _ = torch.linalg.solve_ex(gram, (adjoint @ r.unsqueeze(-1)))
    return g - (gamma.transpose(-1, -2) @ dg).squeeze(-2)
