r"""Mixtures of K fixed permutations with softmax weights, which are doubly stochastic."""

import itertools
import math

import torch
from torch import Tensor

from jpmhc import checks, precision
from jpmhc.manifolds import birkhoff

violation = birkhoff.violation  # the mixtures of permutations are the doubly stochastic matrices (Birkhoff's theorem)
FILL_SEED = 42  # the paper's seed for the random permutations of a basis


def basis(n: int, size: int, seed: int = FILL_SEED) -> Tensor:
    """Return the first `size` permutations of the paper's basis, each as the images of 0, …, n−1. [size, n]

    The basis has the identity, the transpositions (0 1), (2 3), …, the cyclic shifts by 1 and −1, and then random
    permutations drawn with `seed`. No permutation occurs twice.
    """
    if n < 2:
        raise ValueError(f"a permutation basis needs n of at least 2, got {n}")
    if not 1 <= size <= math.factorial(n):
        raise ValueError(f"the basis size must be between 1 and {n}! = {math.factorial(n)}, got {size}")
    identity = list(range(n))
    swaps = ([*identity[:i], i + 1, i, *identity[i + 2 :]] for i in range(0, n - 1, 2))
    shifts = ([(i + step) % n for i in range(n)] for step in (1, -1))
    chosen: list[tuple[int, ...]] = []
    generator = torch.Generator().manual_seed(seed)
    random = (torch.randperm(n, generator=generator, device="cpu").tolist() for _ in itertools.count())
    for images in itertools.chain([identity], swaps, shifts, random):
        if len(chosen) == size:
            break
        if tuple(images) not in chosen:
            chosen.append(tuple(images))
    return torch.tensor(chosen, device="cpu")


def matrices(perms: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    r"""Build the matrices $(P_\sigma)_{ij} = 1[\sigma(j) = i]$ of the rows σ of `perms`. [K, n] → [K, n, n]"""
    check_rows(perms)
    return indicator(perms).to(dtype)


def check_rows(perms: Tensor) -> None:
    """Raise a ValueError unless every row of `perms` [K, n] is a permutation of 0..n-1."""
    n = perms.shape[-1] if perms.ndim == 2 else 0
    if not n or len(perms) == 0 or any(sorted(row) != list(range(n)) for row in perms.tolist()):
        raise ValueError("expected permutations as rows that hold each of 0..n-1 once, of shape [K, n] with K >= 1")


def indicator(perms: Tensor) -> Tensor:
    """Return `matrices(perms)` as booleans, without checking `perms`. [K, n] → [K, n, n]"""
    return perms.unsqueeze(-2) == torch.arange(perms.shape[-1], device=perms.device).unsqueeze(-1)


def mix(logits: Tensor, basis: Tensor) -> Tensor:
    """Return mixtures of permutation matrices with softmax weights. [..., n, n]

    Args:
        logits: One logit per permutation. [..., K]
        basis: Permutations [K, n], or their matrices [K, n, n], which saves building them.
    """
    if basis.shape[0] != logits.shape[-1]:
        raise ValueError(f"{basis.shape[0]} permutations need as many logits, got {logits.shape[-1]}")
    logits = precision.single_or_double(logits)
    stack = matrices(basis) if basis.ndim == 2 else basis
    stack = stack.to(dtype=logits.dtype, device=logits.device)
    with precision.without_autocast(logits):
        return (logits.softmax(-1) @ stack.flatten(1)).unflatten(-1, stack.shape[-2:])


def sample(n: int, size: int, shape: tuple[int, ...] = (), *, generator: torch.Generator | None = None) -> Tensor:
    """Draw random mixtures over the basis of `size` permutations, with standard normal logits. [*shape, n, n]

    >>> sample(4, 6, (3,)).shape
    torch.Size([3, 4, 4])
    """
    logits = torch.randn(*checks.sizes(shape, "shape"), size, generator=generator, dtype=torch.float64)
    return mix(logits, basis(n, size))
