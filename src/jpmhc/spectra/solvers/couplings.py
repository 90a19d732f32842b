r"""How the blocks of the chain's resolvent are coupled: what Newton's method needs (docs/derivations/chain.md).

A change of a self-energy changes every block of the resolvent, $dM = M\,d\Sigma\,M$: the derivative of the equation is
made of the blocks $M_{ij}$ off the diagonal. A sweep from the output to the input carries all $M V_j$ along, where
$V_j$ are the few directions that the noise of a layer reads or writes, or all of them.
"""

import torch
from torch import Tensor

from jpmhc.spectra.solvers.sweep import one_minus, solve_linear


def find_couplings(
    forward: Tensor,
    backward: Tensor,
    resolvent: Tensor,
    sigma_x: Tensor,
    skips: Tensor,
    vectors: list[Tensor],
    to_streams: Tensor,
) -> tuple[Tensor, Tensor]:
    r"""Compute sums of squares of $V_i^\top M_{ij} V_j$ for all pairs of blocks, and $M_{x_0 j} V_j$ in streams.

    Args:
        forward: P of docs/derivations/chain.md. [L + 1, b, n, n]
        backward: N. [L + 1, b, n, n]
        resolvent: $(1 - N P)^{-1}$. [L + 1, b, n, n]
        sigma_x: The self-energies of the x blocks. [L, b, n, n] or [L, b, 1, 1]
        skips: The layers' skips. [L, 1, n, n]
        vectors: V of all x and of all y blocks. [L, 1, n, k] each
        to_streams: From the first block's basis to the streams. [n, n]

    Returns:
        The squares [b, 2 L, 2 L], x blocks first, and the couplings of the input [b, 2 L, n, k].
    """
    depth, batch, n, k = len(skips), forward.shape[1], *vectors[0].shape[-2:]
    eye = torch.eye(n, dtype=forward.dtype, device=forward.device)
    blocked = one_minus(sigma_x * forward[:-1] if sigma_x.shape[-1] == 1 else sigma_x @ forward[:-1])
    # M_{y_l j} = (1 - Sigma_x P)^-1 A^T M_{y_(l+1) j} and M_{x_l j} = P M_{y_l j} for every block j further on.
    back = solve_linear(blocked, eye) @ skips.mT
    x_start = resolvent[:-1] @ vectors[0]
    y_start = resolvent[1:] @ (backward[1:] @ vectors[1])
    x_read, y_read = vectors[0].mT @ forward[:-1], vectors[1].mT
    # Blocks in the order of the chain, x_0, y_1, x_1, ..., y_L, from the last to the first: each is coupled to itself
    # and to those after it, which are carried along.
    squares = forward.new_zeros(batch, 2 * depth, 2 * depth)
    carried = forward.new_empty(batch, n, 2 * depth * k)
    for place in reversed(range(2 * depth)):
        layer, part = divmod(place, 2)
        here = carried[..., place * k :]
        if part == 1:
            here[..., :k] = y_start[layer]
        else:
            here[..., k:] = back[layer] @ here[..., k:]
            here[..., :k] = x_start[layer]
        coupled = (y_read if part == 1 else x_read)[layer] @ here
        torch.sum(coupled.square().unflatten(-1, (-1, k)), (1, 3), out=squares[:, place, place:])
    squares = squares + squares.triu(1).mT
    order = torch.arange(2 * depth, device=forward.device).view(depth, 2).mT.flatten()  # x blocks first
    first = (to_streams @ forward[0] @ carried).unflatten(-1, (-1, k)).transpose(1, 2)
    return squares[:, order][:, :, order], first[:, order]
