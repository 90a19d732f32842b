r"""The chain's two eliminations as one recursion, run layer by layer or in blocks of layers side by side.

In docs/derivations/chain.md the backward elimination of $N_l$ and the forward elimination of $P_l$ mirror each other.
Both have the form $S \leftarrow \text{add} + C\,(S^{-1} - \text{sat})^{-1} C^\top$ with a state S ($P_l$ or $N_l$), a
skip or its transpose C, and self-energies add and sat. One function therefore computes both, without $S^{-1}$:
$$S \leftarrow \text{add} + C\,(I - S\,\text{sat})^{-1} S\,C^\top .$$
Two such maps, one after the other, are again such a map. Each block of layers can therefore be reduced to one map, and
all blocks at the same time.
"""

import torch
from torch import Tensor

_FEW_STREAMS = 4  # up to here one product with a matrix [n², n²] takes less time than two with matrices [n, n]


def times(matrix: Tensor, energy: Tensor) -> Tensor:
    """Return matrix @ energy; a self-energy of shape [..., 1, 1] stands for a multiple of the identity."""
    return matrix * energy if energy.shape[-1] == 1 else matrix @ energy


def plus(matrix: Tensor, energy: Tensor) -> Tensor:
    """Add a self-energy to a matrix in place; one of shape [..., 1, 1] stands for a multiple of the identity."""
    if energy.shape[-1] == 1 and matrix.shape[-1] > 1:
        matrix.diagonal(dim1=-2, dim2=-1).add_(energy.squeeze(-1))
        return matrix
    return matrix.add_(energy)


def saturate(state: Tensor, energy: Tensor) -> Tensor:
    r"""Return $(S^{-1} - \Sigma)^{-1} = (I - S\Sigma)^{-1} S$ for the state S and self-energy Σ; S may be singular."""
    return solve_linear(one_minus(times(state, energy)), state)


def one_minus(matrix: Tensor) -> Tensor:
    """Compute I - matrix in place."""
    matrix.neg_().diagonal(dim1=-2, dim2=-1).add_(1)
    return matrix


def solve_linear(matrix: Tensor, right: Tensor) -> Tensor:
    """Return matrix^{-1} right; a singular matrix gives values that are not finite, which the schemes reject."""
    if matrix.shape[-1] == 1:
        return right / matrix
    return torch.linalg.solve_ex(matrix, right.expand_as(matrix) if right.ndim == 2 else right)[0]


def sweep(first: Tensor, skips: Tensor, add: Tensor, sat: Tensor, blocks: int = 1) -> Tensor:
    r"""Compute $S_0, \ldots, S_L$ of $S_l = \text{add}_l + C_l (I - S_{l-1} \text{sat}_l)^{-1} S_{l-1} C_l^\top$.

    Args:
        first: $S_0$ for each of W directions of the sweep, such as forward and backward. [W, B, n, n]
        skips: $C_l$ of each of the W directions, shared by all points or one per point. [W, L, 1 or B, n, n]
        add: The $\text{add}_l$; [..., 1, 1] for multiples of the identity. [L, W, B, n, n]
        sat: The $\text{sat}_l$; [..., 1, 1] for multiples of the identity. [L, W, B, n, n]
        blocks: The number of blocks of layers; 1 for the plain recursion. About the square root of L gives three short
            recursions instead of a long one, which is faster if launching small GPU kernels takes most of the time.
    """
    length = -(-skips.shape[1] // blocks)
    if blocks == 1 or length == 1:
        return _recur(first, skips.transpose(0, 1), add, sat)
    return _blocked(first, skips, add, sat, length)


def _recur(first: Tensor, skips: Tensor, add: Tensor, sat: Tensor) -> Tensor:
    """Compute the states [L + 1, ..., n, n] layer by layer: first [..., n, n]; skips, add and sat [L, ..., n, n]."""
    states = first.new_empty(len(skips) + 1, *first.shape)
    states[0] = first
    doubled = _double(skips) if skips.shape[-3] == 1 and skips.shape[-1] <= _FEW_STREAMS else None
    for layer, skip in enumerate(skips):
        inner = saturate(states[layer], sat[layer])
        if doubled is None:
            torch.matmul(skip @ inner, skip.mT, out=states[layer + 1])
        else:
            columns = inner.mT.flatten(-2)  # a view: solvers return columns
            torch.matmul(columns, doubled[layer], out=states[layer + 1].flatten(-2))
        plus(states[layer + 1], add[layer])
    return states


def _double(skips: Tensor) -> Tensor:
    r"""Return a matrix D with $\mathrm{rows}(C X C^\top) = \mathrm{columns}(X)\,D$ for all X. [..., n², n²]

    Here rows(X) [n²] lists the entries of X row by row, and columns(X) [n²] lists them column by column.

    Args:
        skips: One C for all points. [..., 1, n, n]
    """
    return torch.einsum("...ia,...jb->...baij", skips, skips).flatten(-2).flatten(-3, -2).squeeze(-3)


def _blocked(first: Tensor, skips: Tensor, add: Tensor, sat: Tensor, length: int) -> Tensor:
    """Compute the states of `_recur` in blocks of `length` layers, all blocks side by side.

    First each block is composed into one map; these maps give the state at the start of each block.
    """
    width, depth, each, n, _ = skips.shape
    count = -(-depth // length)
    padding = count * length - depth
    # Extra layers fill the last block; their states are cut off at the end.
    skips = torch.cat([skips, skips.new_zeros(width, padding, each, n, n)], 1).unflatten(1, (count, length))
    skips = skips.permute(2, 1, 0, 3, 4, 5)  # [length, count, W, 1 or B, n, n]
    add, sat = (
        torch.cat([part, part.new_zeros(padding, *part.shape[1:])]).unflatten(0, (count, length)).transpose(0, 1)
        for part in (add, sat)
    )  # [length, count, W, B, n or 1, n or 1]
    batch = (count, *first.shape)
    eye = torch.eye(n, dtype=first.dtype, device=first.device)
    # Each block becomes one map S -> E + C (I - S R)^{-1} S C^T, built up layer by layer: its composition with the next
    # layer's map (add, skip, sat) needs one inverse.
    energy, gain, reduction = add[0] * eye if add.shape[-1] == 1 else add[0], skips[0].expand(batch), sat[0]
    reduction = reduction * eye if sat.shape[-1] == 1 else reduction
    for layer in range(1, length):
        resolvent = solve_linear(
            one_minus(times(energy, sat[layer])), torch.cat([energy, gain], -1)
        )  # (I - E sat)^-1 [E, C]
        moved, carried = resolvent[..., :n], resolvent[..., n:]
        reduction = reduction + gain.mT @ (carried * sat[layer] if sat.shape[-1] == 1 else sat[layer] @ carried)
        energy = plus(skips[layer] @ moved @ skips[layer].mT, add[layer])
        gain = skips[layer] @ carried
    starts = first.new_empty(batch)
    starts[0] = first
    for block in range(1, count):
        inner = saturate(starts[block - 1], reduction[block - 1])
        torch.matmul(gain[block - 1] @ inner, gain[block - 1].mT, out=starts[block])
        starts[block] += energy[block - 1]
    states = _recur(starts, skips, add, sat)  # [length + 1, count, W, B, n, n]
    inside = states[1:].transpose(0, 1).flatten(0, 1)[:depth]
    return torch.cat([first.unsqueeze(0), inside])
