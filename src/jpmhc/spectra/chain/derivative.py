r"""Products of vectors with the derivative of the chain's equation, for general noise (docs/derivations/chain.md).

The derivative's matrix would have a row and a column for each of the $2 L n (n + 1) / 2$ unknowns. A product is instead
computed by a sweep in both directions with the differentiated recursions of the chain, which takes less time than an
evaluation of the equation.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from jpmhc.spectra.chain.sweep import one_minus, solve_linear

if TYPE_CHECKING:
    from jpmhc.spectra.chain.equation import ChainEquation
    from jpmhc.spectra.chain.noise import General

# The residual of `gmres` is computed once in this many products.
_CHECKED_EVERY = 4


class LinearisedChain:
    r"""The chain's equation linearised at one iterate per point, in the symbols of docs/derivations/chain.md.

    With $B = A\,(1 - P \Sigma_x)^{-1}$ and $C = B P$ the differentiated forward recursion is
    $dP_l = B\,dP_{l-1} B^\top + C\,d\Sigma_x C^\top + d\Sigma_y$; the backward recursion mirrors it.

    Args:
        noise: The equation's noise, which is general.
        x: The iterates' coordinates. [b, columns]
        z: The points. [b]
    """

    def __init__(self, equation: ChainEquation, noise: General, x: Tensor, z: Tensor) -> None:
        self.noise, self.depth = noise, equation.depth
        values = equation.values(x)
        forward, backward, self.resolvent = equation.sweep(z, values)
        self.image = equation.coordinates(equation.from_sweep(values, forward, backward, self.resolvent))
        self.factors, self.image_factors = (
            noise.factorise(part[:, 1:].unflatten(1, (-1, noise.coordinates))) for part in (x, self.image)
        )
        unknown_x, unknown_y = equation.split(values)
        sigma_y, sigma_x = noise.energy(unknown_x, 0), noise.energy(unknown_y, 1)
        # Forward and backward direction, each in the order of its own sweep. [L, 2, b, n, n]
        state = torch.stack([forward[:-1], backward[1:].flip(0)], 1)
        saturated = torch.stack([sigma_x, sigma_y.flip(0)], 1)
        self.carry = equation.skips.transpose(0, 1) @ solve_linear(one_minus(state @ saturated), equation.eye)
        self.cause = self.carry @ state
        self.block_x, self.block_y = forward[:-1] @ self.resolvent[:-1], self.resolvent[1:] @ backward[1:]
        # d log(i G) = dG / G
        green = torch.exp(self.image[:, 0]) * -1j * equation.streams
        self.trace = equation.trace / green[:, None, None]

    def product(self, change: Tensor) -> Tensor:
        """Return the change of g(x) caused by a small change of x, both in `SelfEnergy`'s coordinates. [b, columns]"""
        blocks = self.noise.change_of_unknowns(self.factors, change[:, 1:].unflatten(1, (-1, self.noise.coordinates)))
        caused_y, caused_x = (
            self.noise.energy(part.flatten(-2), side)
            for side, part in enumerate(blocks.transpose(0, 1).split(self.depth))
        )
        added, inner = (
            torch.stack([first, second.flip(0)], 1) for first, second in ((caused_y, caused_x), (caused_x, caused_y))
        )
        added = added + self.cause @ inner @ self.cause.mT
        states = torch.zeros_like(torch.cat([added[:1], added]))
        for layer, carry in enumerate(self.carry):
            states[layer + 1] = carry @ states[layer] @ carry.mT + added[layer]
        forward, backward = states[:, 0], states[:, 1].flip(0)
        before, after = self.resolvent[:-1], self.resolvent[1:]
        new_x = before.mT @ forward[:-1] @ before + self.block_x @ backward[:-1] @ self.block_x
        new_y = after @ backward[1:] @ after.mT + self.block_y @ forward[1:] @ self.block_y
        green = (self.trace * new_x[0].mT).sum((-2, -1))
        moved = self.noise.change_of_coordinates(self.image_factors, torch.cat([new_x, new_y]).transpose(0, 1))
        return torch.cat([green.unsqueeze(-1), moved.flatten(1)], 1)


def find_couplings(
    forward: Tensor,
    backward: Tensor,
    resolvent: Tensor,
    sigma_x: Tensor,
    skips: Tensor,
    vectors: list[Tensor],
    to_streams: Tensor,
) -> tuple[Tensor, Tensor]:
    r"""Compute the sum of squares of $V_i^\top M_{ij} V_j$ for each pair of blocks, and $M_{x_0 j} V_j$ in streams.

    M is the inverse of the chain's pencil (equation.py), $V_i$ has the noise's vectors for block i
    (`SelfEnergy.vectors`), and x₀ is the block of the input.

    Args:
        forward: P of docs/derivations/chain.md. [L + 1, b, n, n]
        backward: N of docs/derivations/chain.md. [L + 1, b, n, n]
        resolvent: $(1 - N P)^{-1}$. [L + 1, b, n, n]
        sigma_x: The self-energies of the x blocks. [L, b, n, n] or [L, b, 1, 1]
        skips: The layers' skips. [L, 1, n, n]
        vectors: V of all x blocks and V of all y blocks. [L, 1, n, k] each
        to_streams: The matrix from the first block's basis to the streams. [n, n]

    Returns:
        The sums of squares [b, 2 L, 2 L], x blocks first, and the couplings of the input [b, 2 L, n, k].
    """
    depth, batch, n, k = len(skips), forward.shape[1], *vectors[0].shape[-2:]
    eye = torch.eye(n, dtype=forward.dtype, device=forward.device)
    blocked = one_minus(sigma_x * forward[:-1] if sigma_x.shape[-1] == 1 else sigma_x @ forward[:-1])
    # M_{y_l j} = (1 - Sigma_x P)^-1 A^T M_{y_(l+1) j} and M_{x_l j} = P M_{y_l j} for every later block j.
    back = solve_linear(blocked, eye) @ skips.mT
    x_start = resolvent[:-1] @ vectors[0]
    y_start = resolvent[1:] @ (backward[1:] @ vectors[1])
    x_read, y_read = vectors[0].mT @ forward[:-1], vectors[1].mT
    # The blocks x_0, y_1, x_1, ..., y_L of the chain from the last to the first. Each block is coupled to itself and to
    # the blocks after it, whose columns are in `carried`.
    squares = forward.new_zeros(batch, 2 * depth, 2 * depth)
    carried = forward.new_empty(batch, n, 2 * depth * k)
    for block in reversed(range(2 * depth)):
        layer, part = divmod(block, 2)
        here = carried[..., block * k :]
        if part == 1:
            here[..., :k] = y_start[layer]
        else:
            here[..., k:] = back[layer] @ here[..., k:]
            here[..., :k] = x_start[layer]
        coupled = (y_read if part == 1 else x_read)[layer] @ here
        torch.sum(coupled.square().unflatten(-1, (-1, k)), (1, 3), out=squares[:, block, block:])
    squares = squares + squares.triu(1).mT
    order = torch.arange(2 * depth, device=forward.device).view(depth, 2).mT.flatten()  # x blocks first
    first = (to_streams @ forward[0] @ carried).unflatten(-1, (-1, k)).transpose(1, 2)
    return squares[:, order][:, :, order], first[:, order]


def gmres(
    product: Callable[[Tensor], Tensor], right: Tensor, weight: Tensor, *, steps: int, tolerance: float
) -> Tensor:
    """Solve c - product(c) = right for c [b, d] by GMRES, for a linear map that is small in most directions.

    Args:
        product: The linear map, [b, d] -> [b, d].
        right: The right-hand sides. [b, d]
        weight: The weights of the unknowns in the norm of the residual. [b, d]
        steps: The largest number of products.
        tolerance: The largest norm of the residual, relative to the norm of the right-hand side.
    """
    first = right * weight
    size = torch.linalg.vector_norm(first, dim=-1, keepdim=True)
    basis = right.new_zeros(len(right), steps + 1, right.shape[-1])
    basis[:, 0] = first / size
    reduced = right.new_zeros(len(right), steps + 1, steps)
    wanted = right.new_zeros(len(right), steps + 1, 1)
    wanted[:, 0] = size
    for count in range(1, steps + 1):
        known = basis[:, :count]
        change = known[:, -1] / weight
        new = (change - product(change)) * weight
        for _ in range(2):  # rounding leaves components along the basis after one orthogonalisation
            shares = known.conj() @ new.unsqueeze(-1)
            new = new - (shares.mT @ known).squeeze(-2)
            reduced[:, :count, count - 1] += shares.squeeze(-1)
        norm = torch.linalg.vector_norm(new, dim=-1, keepdim=True)
        reduced[:, count, count - 1] = norm.squeeze(-1)
        basis[:, count] = new / norm.clamp_min(1e-300)
        if count % _CHECKED_EVERY == 0 or count == steps:
            matrix, goal = reduced[:, : count + 1, :count], wanted[:, : count + 1]
            orthogonal, triangle = torch.linalg.qr(matrix)
            shares = torch.linalg.solve_triangular(triangle, orthogonal.mH @ goal, upper=True)
            left = torch.linalg.vector_norm(matrix @ shares - goal, dim=(-2, -1))
            if bool((left <= tolerance * size.squeeze(-1)).all()) or count == steps:
                break
    return (shares.mT @ known).squeeze(-2) / weight
