"""GMRES for a batch of linear equations whose matrices are known by their products with vectors alone."""

from collections.abc import Callable

import torch
from torch import Tensor

# How often the residual is asked for.
_CHECKED_EVERY = 4


def gmres(
    product: Callable[[Tensor], Tensor], right: Tensor, weight: Tensor, *, steps: int, tolerance: float
) -> Tensor:
    """Solve c - product(c) = right for all rows, where the products of most directions are small.

    Args:
        product: A linear map, [b, d] -> [b, d].
        right: What the equations have on their right. [b, d]
        weight: What a change of each unknown is multiplied with to be compared with others. [b, d]
        steps: The most products.
        tolerance: Of the residual, relative to the right-hand side.
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
        for _ in range(2):  # once more, because the first time leaves some of the known directions
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
