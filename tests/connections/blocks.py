"""Connections that tests of several files look at."""

import torch
from torch import nn

import jpmhc

DIM, N = 8, 4


def perturbed(**options) -> jpmhc.HyperConnection:
    """A block in float64 whose coefficients depend on the token."""
    torch.manual_seed(0)
    block = jpmhc.HyperConnection(nn.Sequential(nn.Linear(DIM, DIM), nn.Tanh()), DIM, N, index=1, **options).double()
    with torch.no_grad():
        for parameter in block.map.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return block
