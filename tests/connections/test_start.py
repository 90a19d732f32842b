"""How a fresh connection starts, as the plain residual, and how it leaves the start."""

import pytest
import torch
from torch import nn

import jpmhc

NAMES = list(jpmhc.MIXERS)
DIM, N = 8, 4


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("gate", ["softmax", "softmax_matrix", "sigmoid"])
@pytest.mark.parametrize("dynamic", [True, False])
def test_start_is_the_plain_residual(name, gate, dynamic):
    torch.manual_seed(0)
    for dtype, bound in ((torch.float32, 4e-6), (torch.float64, 1e-13)):
        torch.set_default_dtype(dtype)
        try:
            f = nn.Sequential(nn.Linear(DIM, DIM), nn.GELU(), nn.Linear(DIM, DIM))
            block = jpmhc.HyperConnection(f, DIM, N, name, read=gate, write=gate, norm="layer", dynamic=dynamic)
            x = 10 * torch.randn(2, 5, DIM)
        finally:
            torch.set_default_dtype(torch.float32)
        plain = x + f(x)
        error = (block(jpmhc.expand_streams(x, N)) - jpmhc.expand_streams(plain, N)).abs().max()
        assert error <= bound * (x.abs() + f(x).abs()).max()


def stack(name: str) -> jpmhc.HyperConnectionStack:
    torch.manual_seed(0)
    layers = (nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16)) for _ in range(6))
    return jpmhc.HyperConnectionStack(jpmhc.HyperConnection(f, 16, N, name, index=k) for k, f in enumerate(layers))


def train(model: jpmhc.HyperConnectionStack, optimizer: torch.optim.Optimizer) -> tuple[float, float]:
    """How far the streams part and the skips move in fifty steps."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(64, 16, generator=generator, dtype=torch.float64)
    target = torch.randn(64, 16, generator=generator, dtype=torch.float64)
    streams = jpmhc.expand_streams(x, N)
    before = [block.coefficients(streams).skip.detach() for block in model.connections]
    for _ in range(50):
        optimizer.zero_grad()
        (jpmhc.reduce_streams(model(streams)) - target).square().mean().backward()
        optimizer.step()
    out = model(streams)
    apart = (out - out.mean(-2, keepdim=True)).abs().max().item()
    after = [block.coefficients(streams).skip.detach() for block in model.connections]
    return apart, max((a - b).abs().max().item() for a, b in zip(after, before))


@pytest.mark.parametrize("name", [n for n in NAMES if n not in ("identity", "unconstrained")])
def test_constrained_streams_part_under_plain_sgd(name):
    model = stack(name).double()
    assert train(model, torch.optim.SGD(model.parameters(), lr=0.1))[0] > 1e-3


@pytest.mark.parametrize("name", [n for n in NAMES if n != "identity"])
def test_skips_move_under_adam(name):
    model = stack(name).double()
    assert train(model, torch.optim.Adam(model.parameters(), lr=1e-3))[1] >= 1e-3


def test_symmetric_reads_would_keep_the_streams_equal():
    # the control of the test above: without a favoured stream nothing ever parts them
    model = stack("sinkhorn").double()
    for block in model.connections:
        with torch.no_grad():
            block.map.bias[: block.map.sizes[0]] = 0
    assert train(model, torch.optim.SGD(model.parameters(), lr=0.1))[0] < 1e-12
