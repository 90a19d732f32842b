r"""Bases in which a chain of skips is block diagonal, one block for each rate of growth.

A deep product of skips has singular values that differ by many orders of magnitude. In a common basis the small
singular values are lost in the rounding of the large ones. In bases that follow the product's singular directions from
layer to layer, every entry keeps its own relative precision. The basis after layer l comes from intersections of the
subspaces that layers up to l stretch most with the subspaces that layers after l stretch least
(docs/derivations/chain.md).
"""

import math
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

# Directions whose stretch over the whole chain differs by less than this factor stay in one block.
_APART = 1e2
# Directions stretched less than the first by more than this factor count as equally stretched: rounding hides them.
_NULL = 1e80
# A basis with a larger condition number costs more digits than it saves.
_CONDITION = 1e3
# The number of sweeps through the chain and back, which turn any frame into the product's singular directions.
_SWEEPS = 2


def separating_bases(skips: Tensor) -> tuple[Tensor, Tensor] | None:
    r"""Return bases $T_0, \ldots, T_L$ such that all transformed skips $T_l A_l T_{l-1}^{-1}$ are block diagonal.

    Args:
        skips: The skips $A_l$, first layer first. [L, n, n]

    Returns:
        The matrices $T_l$ [L + 1, n, n] and the transformed skips [L, n, n]; None if all directions grow at similar
        rates or no well-conditioned bases exist.
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
    # While the bases are badly conditioned, the narrowest gap is given up.
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
    """Multiply the orthogonal matrix `first` by all skips, with a QR decomposition after each layer.

    Returns:
        The orthogonal factors, `first` included [L + 1, n, n], and the logarithm of each column's total stretch [n].
    """
    frames, stretch = [first.numpy()], np.zeros(first.shape[-1])
    for skip in skips.numpy():  # NumPy decomposes one small matrix in a tenth of PyTorch's time
        frame, triangle = np.linalg.qr(skip @ frames[-1])
        frames.append(frame)
        stretch += np.log(np.abs(np.diagonal(triangle)).clip(1e-300))
    return torch.from_numpy(np.stack(frames)), torch.from_numpy(stretch)


def _intersections(grown: Tensor, shrinking: Tensor, starts: list[int]) -> Tensor:
    r"""Return $T = U Q^\top$, with block triangular factors L (lower) and U (upper) of $B^\top Q = L U$. [L + 1, n, n]

    As bases, Q makes all skips block upper triangular, and B makes all skips block lower triangular.

    Args:
        grown: The orthogonal matrices Q, sorted by the stretch of the layers before. [L + 1, n, n]
        shrinking: The orthogonal matrices B, sorted by the stretch of the layers after. [L + 1, n, n]
        starts: The first index of each block.
    """
    n = grown.shape[-1]
    left = shrinking.mT @ grown
    upper = torch.eye(n, dtype=torch.float64).repeat(len(left), 1, 1)
    for start, end in pairwise(starts):
        row, _ = torch.linalg.solve_ex(left[:, start:end, start:end], left[:, start:end, end:])
        upper[:, start:end, end:] = row
        left[:, end:, end:] -= left[:, end:, start:end] @ row
    return upper @ grown.mT
