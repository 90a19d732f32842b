r"""Products of vectors with the derivative of the chain's equation (docs/derivations/chain.md).

For general noise the derivative's matrix would have a row and a column for each of the $2 L n (n + 1) / 2$ unknowns. A
product is instead computed by a sweep in both directions with the differentiated recursions of the chain, which takes
less time than an evaluation of the equation.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from jpmhc.spectra.chain.sweep import one_minus, solve_linear, times

if TYPE_CHECKING:
    from jpmhc.spectra.chain.equation import ChainEquation

# The residual of `gmres` is computed once in this many products.
_CHECKED_EVERY = 4


class LinearisedChain:
    r"""The chain's equation linearised at one iterate per point, in the symbols of docs/derivations/chain.md.

    With $B = A\,(1 - P \Sigma_x)^{-1}$ and $C = B P$ the differentiated forward recursion is
    $dP_l = B\,dP_{l-1} B^\top + C\,d\Sigma_x C^\top + d\Sigma_y$; the backward recursion mirrors it.

    Args:
        equation: The equation; its noise must be `linear` (`SelfEnergy`).
        x: The iterates' coordinates. [b, columns]
        z: The points. [b]
    """

    def __init__(self, equation: ChainEquation, x: Tensor, z: Tensor) -> None:
        self.equation, noise = equation, equation.noise
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
        self.carry = equation.skips.transpose(0, 1) @ solve_linear(one_minus(times(state, saturated)), equation.eye)
        self.cause = self.carry @ state
        self.block_x, self.block_y = forward[:-1] @ self.resolvent[:-1], self.resolvent[1:] @ backward[1:]
        # d log(i G) = dG / G
        green = torch.exp(self.image[:, 0]) * -1j * equation.streams
        self.trace = equation.trace / green.repeat_interleave(noise.paths)[:, None, None]

    def product(self, change: Tensor) -> Tensor:
        """Return the change of g(x) caused by a small change of x, both in `SelfEnergy`'s coordinates. [b, columns]"""
        noise, eye = self.equation.noise, self.equation.eye
        blocks = noise.change_of_unknowns(self.factors, change[:, 1:].unflatten(1, (-1, noise.coordinates)))
        parts = blocks.transpose(0, 1).split(self.equation.depth)
        energies = (noise.energy(part, side) for side, part in enumerate(parts))
        caused_y, caused_x = (energy * eye if energy.shape[-1] == 1 else energy for energy in energies)
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
        green = (self.trace * new_x[0].mT).sum((-2, -1)).unflatten(0, (-1, noise.paths)).mean(-1)
        orders = [noise.order(new, eye.expand_as(new), side) for side, new in enumerate((new_x, new_y))]
        moved = noise.change_of_coordinates(self.image_factors, torch.cat(orders).transpose(0, 1))
        return torch.cat([green.unsqueeze(-1), moved.flatten(1)], 1)


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
