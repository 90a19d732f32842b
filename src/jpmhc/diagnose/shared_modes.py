r"""Shared modes: the few matrices that training adds to the Jacobians of all sublayers.

$R_l$ is the Jacobian [d, d] of sublayer l at one token, without its multiple of the identity;
$g_l^2 = \|R_l\|_F^2 / d$. The Gram matrix over layers $C_{lm} = \langle R_l, R_m \rangle / (d\, g_l g_m)$ has
eigenpairs $(w_k, u_k)$. Independent $R_l$ give the Marchenko–Pastur bulk around one; each eigenvalue above the bulk
is a shared mode. The shared part of a sublayer, $S_l = g_l \sum_{k \le K} u_{lk} \sum_m u_{mk} R_m / g_m$, adds up
coherently over layers; the own part $R_l - S_l$ acts as if its singular vectors were random
(docs/derivations/real_networks.md, "Trained networks share modes").
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

# An eigenvalue above this factor times the upper edge of the bulk for independent layers is a shared mode. The factor
# is above 1 because sublayers of one kind correlate a little even in fresh networks, by their norms and slopes.
_ABOVE_BULK = 1.45


@dataclass(frozen=True, eq=False)
class SharedModes:
    """The shared modes of a chain of layers at one token.

    Attributes:
        correlations: The Gram matrix over layers of the normalised sublayer Jacobians. [L, L]
        eigenvalues: The eigenvalues of `correlations`, descending. [L]
        limit: An eigenvalue above this limit is a shared mode.
        directions: The eigenvectors of the K shared modes: each layer's weight in each mode. [L, K]
        shares: For each sublayer, the shared part's share of the squared Frobenius norm of R_l. [L]
        share: The share of all shared parts in the sum of the layers' squared Frobenius norms.
    """

    correlations: Tensor
    eigenvalues: Tensor
    limit: float
    directions: Tensor
    shares: Tensor
    share: float

    @property
    def count(self) -> int:
        """The number of shared modes, K."""
        return self.directions.shape[1]

    def __repr__(self) -> str:
        largest = ", ".join(f"{value:.3g}" for value in self.eigenvalues[: max(self.count, 1)].tolist())
        return f"SharedModes(count={self.count}, share={self.share:.3g}, eigenvalues={largest} of {len(self.shares)})"


def find_modes(products: Tensor, samples: int) -> SharedModes:
    """Find the shared modes of layers from the inner products of their sublayers' Jacobians.

    Args:
        products: Inner products of the Jacobians R_l [d, d] without their multiples of the identity. [L, L]
        samples: The number of summands in each inner product: d² for matrices, min(k, d) d for products with k random
            vectors.

    Example:
        >>> layers = torch.randn(6, 40, 40, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
        >>> layers[1:] += layers[0]
        >>> find_modes(multiply_all(layers), 40**2).count
        1
    """
    squares = products.diagonal().clamp_min(0)
    sizes = squares.sqrt()
    alive = sizes > 1e-12 * sizes.max()
    inverse = torch.where(alive, 1 / sizes.clamp_min(1e-300), 0.0)
    correlations = products * torch.outer(inverse, inverse)
    values, vectors = torch.linalg.eigh(correlations)
    values, vectors = values.flip(0), vectors.flip(1)
    bulk = values[: max(min(int(alive.sum()), samples), 1)].median()
    limit = _ABOVE_BULK * (1 + (len(values) / samples) ** 0.5) ** 2 * float(bulk)
    count = int((values > limit).sum())
    directions = vectors[:, :count]
    shares = directions.square() @ values[:count]
    total = float(squares.sum())
    share = float((shares * squares).sum()) / total if total > 0 else 0.0
    return SharedModes(correlations, values, limit, directions, shares, share)


def multiply_all(parts: Tensor) -> Tensor:
    """Compute the inner products of all pairs of matrices or sketches. [L, ...] → [L, L]"""
    flat = parts.flatten(1)
    return flat @ flat.mT


def split_shared(matrices: Sequence[Tensor], modes: SharedModes) -> list[tuple[Tensor, Tensor]]:
    """Split each sublayer's Jacobian into its shared part and its own part. [d, d] each

    Args:
        matrices: The Jacobians without their multiples of the identity. [d, d] each
    """
    if modes.count == 0:
        return [(torch.zeros_like(matrix), matrix) for matrix in matrices]
    stack = torch.stack(list(matrices))
    sizes = stack.flatten(1).norm(dim=1)
    inverse = torch.where(sizes > 0, 1 / sizes.clamp_min(1e-300), 0.0)
    onto_modes = sizes.unsqueeze(1) * (modes.directions @ modes.directions.mT) * inverse  # [L, L]
    shared = (onto_modes @ stack.flatten(1)).view_as(stack)
    return list(zip(shared, stack - shared))
