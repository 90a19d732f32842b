r"""The derivative of the chain's equation for general noise, by its products with vectors (docs/derivations/chain.md).

A matrix would have a row and a column for each of the $2 L n (n + 1) / 2$ unknowns. A product is a sweep in both
directions, with the recursions of the chain differentiated; it takes less time than an evaluation of the equation.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from jpmhc.spectra.solvers.sweep import one_minus, solve_linear

if TYPE_CHECKING:
    from jpmhc.spectra.solvers.chain_equation import ChainEquation
    from jpmhc.spectra.solvers.general_noise import General


class LinearisedChain:
    r"""The chain's equation near one iterate a point.

    With $B = A\,(1 - P \Sigma_x)^{-1}$ and $C = B P$ the forward recursion becomes
    $dP_l = B\,dP_{l-1} B^\top + C\,d\Sigma_x C^\top + d\Sigma_y$, and the backward one mirrors it.

    Args:
        equation: The equation of general noise.
        noise: Its noise.
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
        # Both directions one after the other, each in the order of its own sweep. [L, 2, b, n, n]
        state = torch.stack([forward[:-1], backward[1:].flip(0)], 1)
        saturated = torch.stack([sigma_x, sigma_y.flip(0)], 1)
        self.carry = equation.skips.transpose(0, 1) @ solve_linear(one_minus(state @ saturated), equation.eye)
        self.cause = self.carry @ state
        self.block_x, self.block_y = forward[:-1] @ self.resolvent[:-1], self.resolvent[1:] @ backward[1:]
        # d log(i G) = dG / G
        green = torch.exp(self.image[:, 0]) * -1j * equation.streams
        self.trace = equation.trace / green[:, None, None]

    def product(self, change: Tensor) -> Tensor:
        """Return the change of the image's coordinates with a change of x. [b, columns]"""
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
