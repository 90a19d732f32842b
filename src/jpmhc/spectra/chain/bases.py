r"""Bases in which a chain of skips is block diagonal, one block for each rate of growth.

A deep product of skips has singular values that differ by many orders of magnitude. In a common basis the small ones
drown in the rounding of the large ones; in a basis that follows the product's own directions from layer to layer, every
entry keeps its own relative precision. The basis after layer l belongs to the intersections of what the layers up to l
have stretched most with what the layers after l will stretch least (docs/derivations/chain.md).
"""

import math
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

# Directions whose stretch over the whole chain differs by less than this factor may stay in one block.
_APART = 1e2
# What is stretched less than the first direction by this factor is null: rounding has no directions in it.
_NULL = 1e80
# A basis worse conditioned than this costs more digits than it saves.
_CONDITION = 1e3
# Sweeps there and back that turn any frame into the product's own.
_SWEEPS = 2


def separating_bases(skips: Tensor) -> tuple[Tensor, Tensor] | None:
    r"""Find matrices $T_0, \ldots, T_L$ that make all $T_l A_l T_{l-1}^{-1}$ block diagonal, or None where not needed.

    Args:
        skips: First layer first. [L, n, n]

    Returns:
        The matrices $T_l$ [L + 1, n, n] and the transformed skips [L, n, n], exactly block diagonal.
    """
    n = skips.shape[-1]
    device, skips = skips.device, skips.cpu()
    frame = torch.eye(n, dtype=torch.float64)
    transposed = skips.mT.flip(0)
    for _ in range(_SWEEPS):
        frame = _frames(transposed, _frames(skips, frame)[0][-1])[0][-1]
    grown, stretch = _frames(skips, frame)
    shrinking = _frames(transposed, grown[-1])[0].flip(0)
    stretch = stretch.clamp_min(float(stretch[0]) - math.log(_NULL))
    gaps = (stretch[:-1] - stretch[1:]).tolist()
    order = sorted((i for i in range(n - 1) if gaps[i] > math.log(_APART)), key=gaps.__getitem__, reverse=True)
    # The widest gaps first: a narrow one may not be worth the condition that its basis has.
    while order:
        starts = [0, *sorted(i + 1 for i in order)]
        bases = _intersections(grown, shrinking, starts)
        if bool(torch.isfinite(bases).all()) and float(torch.linalg.cond(bases).max()) < _CONDITION:
            block = torch.zeros(n, dtype=torch.int64)
            block[starts[1:]] = 1
            block = block.cumsum(0)
            moved = bases[1:] @ skips @ torch.linalg.inv(bases[:-1])
            moved = torch.where(block == block.unsqueeze(-1), moved, 0.0)
            return bases.to(device), moved.to(device)
        order.pop()
    return None


def _frames(skips: Tensor, first: Tensor) -> tuple[Tensor, Tensor]:
    """Carry a frame through the skips; return all frames [L + 1, n, n] and the log of each column's stretch [n]."""
    frames, stretch = [first.numpy()], np.zeros(first.shape[-1])
    for skip in skips.numpy():  # a decomposition of one small matrix takes NumPy a tenth of the time
        frame, triangle = np.linalg.qr(skip @ frames[-1])
        frames.append(frame)
        stretch += np.log(np.abs(np.diagonal(triangle)).clip(1e-300))
    return torch.from_numpy(np.stack(frames)), torch.from_numpy(stretch)


def _intersections(grown: Tensor, shrinking: Tensor, starts: list[int]) -> Tensor:
    r"""Compute $T = U Q^\top$ with $B^\top Q = L U$ for frames Q grown so far and B of what will grow, by blocks.

    $T_l A_l T_{l-1}^{-1}$ is block upper triangular because Q carries A into a triangle, and block lower triangular
    because B does from the other side.
    """
    n = grown.shape[-1]
    left = shrinking.mT @ grown
    upper = torch.eye(n, dtype=torch.float64).repeat(len(left), 1, 1)
    for start, end in pairwise(starts):
        row, _ = torch.linalg.solve_ex(left[:, start:end, start:end], left[:, start:end, end:])
        upper[:, start:end, end:] = row
        left[:, end:, end:] -= left[:, end:, start:end] @ row
    return upper @ grown.mT
