"""Spectra with closed forms, written from the literature and not from the code they test, and points to ask at."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from jpmhc.spectra import Network, simulate


def fuss_catalan_density(depth: int, count: int) -> tuple[Tensor, Tensor]:
    """Squared singular values of a product of square Gaussian matrices: points inside, and the density there."""
    angle = torch.linspace(0.15, 0.85, count, dtype=torch.float64) * math.pi / (depth + 1)
    sine, inner, outer = angle.sin(), (depth * angle).sin(), ((depth + 1) * angle).sin()
    x = outer ** (depth + 1) / (sine * inner**depth)
    density = sine**2 * inner ** (depth - 1) / (math.pi * outer**depth)
    return x.flip(0), density.flip(0)


def fuss_catalan_edge(depth: int) -> float:
    """The largest squared singular value."""
    return (depth + 1) ** (depth + 1) / depth**depth


def fuss_catalan_moments(depth: int, count: int) -> Tensor:
    """The first moments of the squared singular values."""
    values = [math.comb((depth + 1) * k, k) / (depth * k + 1) for k in range(1, count + 1)]
    return torch.tensor(values, dtype=torch.float64)


def shifted_gaussian_edges(scale: float) -> tuple[float, float]:
    """The ends of the squared singular values of I + scale X."""
    root = scale * (8 + scale**2) ** 1.5
    return tuple((8 + 20 * scale**2 - scale**4 + sign * root) / 8 for sign in (-1, 1))


def deep_identity_edges(noise: float) -> tuple[float, float]:
    """The ends of the squared singular values of infinitely many layers I + sigma X with L sigma^2 = noise."""
    ratio = math.sqrt(1 + 2 / noise)
    upper = (ratio + 1) / (ratio - 1) * math.exp(noise * ratio)
    return 1 / upper, upper


def deep_identity_residual(z: Tensor, green: Tensor, noise: float) -> Tensor:
    """What is left of the equation that the Cauchy transform of infinitely many layers I + sigma X solves."""
    return green - (z * green - 1) * torch.exp(noise * (1 - 2 * z * green))


def identity_moments(depth: int, variance: float) -> tuple[float, float]:
    """The first two moments of the squared singular values of `depth` layers I + sigma X."""
    first = (1 + variance) ** depth
    return first, first**2 * (1 + depth * (2 * variance + variance**2) / (1 + variance) ** 2)


def points(x: Sequence[float], eta: float) -> Tensor:
    """The spectral points x + i eta."""
    return torch.complex(torch.as_tensor(x, dtype=torch.float64), torch.full((len(x),), eta, dtype=torch.float64))


def normal(*shape: int, seed: int = 0) -> Tensor:
    """Standard normal numbers in float64."""
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def sampled(network: Network, z: Tensor, width: int, samples: int) -> tuple[Tensor, Tensor]:
    """The mean of G over sampled networks, and its standard error."""
    each = (1 / (z[:, None, None] - simulate(network, width, samples))).mean(-1)
    return each.mean(-1), each.std(-1).abs() / samples**0.5
