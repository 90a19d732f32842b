"""The coefficients of a connection: their start, their type, and where their parameters live."""

import pytest
import torch
from torch import nn

import jpmhc
from tests.connections.blocks import DIM, N, perturbed

NAMES = list(jpmhc.MIXERS)


def test_coefficients_stay_in_float32_when_the_model_does_not():
    block = jpmhc.HyperConnection(nn.Linear(DIM, DIM), DIM, N, "grassmann", dynamic=False)
    model = nn.Sequential(block, nn.Linear(DIM, DIM)).to(torch.bfloat16)
    assert model[1].weight.dtype == block.sublayer.weight.dtype == torch.bfloat16
    assert {p.dtype for p in block.map.parameters()} == {torch.float32}
    x = torch.randn(3, N, DIM).bfloat16()
    assert {c.dtype for c in block.coefficients(x)} == {torch.float32}
    assert {p.dtype for p in block.double().map.parameters()} == {torch.float64}


def test_autocast_leaves_streams_and_coefficients_alone():
    block = jpmhc.HyperConnection(nn.Linear(DIM, DIM), DIM, N, index=0)
    x = torch.randn(3, N, DIM, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = block(x)
        inside = block.coefficients(x)
    assert out.dtype == torch.float32
    assert all(torch.equal(a, b) for a, b in zip(inside, block.coefficients(x)))
    (gradient,) = torch.autograd.grad(out.square().sum(), x)
    (exact,) = torch.autograd.grad(block(x).square().sum(), x)
    assert (gradient - exact).norm() / exact.norm() < 0.02  # the sublayer alone ran in bfloat16


def test_index_chooses_the_favoured_stream_and_none_is_seeded():
    for index in (0, 2, 7):
        block = jpmhc.HyperConnection(nn.Identity(), DIM, N, index=index)
        assert block.coefficients(torch.zeros(N, DIM)).read.argmax() == index % N
    torch.manual_seed(5)
    draws = [jpmhc.HyperConnection(nn.Identity(), DIM, N).map.bias for _ in range(2)]
    torch.manual_seed(5)
    assert all(torch.equal(a, jpmhc.HyperConnection(nn.Identity(), DIM, N).map.bias) for a in draws)


@pytest.mark.parametrize("name", NAMES)
def test_a_model_built_on_meta_loads_to_the_same_function(name):
    block = perturbed(mixer=name).float()
    with torch.device("meta"):
        empty = jpmhc.HyperConnection(nn.Sequential(nn.Linear(DIM, DIM), nn.Tanh()), DIM, N, name)
    assert empty.to("meta")(torch.zeros(2, N, DIM, device="meta")).shape == (2, N, DIM)
    empty = empty.to_empty(device="cpu")
    empty.load_state_dict(block.state_dict())
    x = torch.randn(3, N, DIM)
    assert torch.equal(empty(x), block(x))


def test_half_precision_default_type_leaves_coefficients_in_float32():
    torch.set_default_dtype(torch.bfloat16)
    try:
        block = jpmhc.HyperConnection(nn.Linear(DIM, DIM), DIM, N)
        out = block(torch.randn(2, N, DIM))
    finally:
        torch.set_default_dtype(torch.float32)
    assert out.dtype == torch.bfloat16
    assert block.map.bias.dtype == torch.float32


@pytest.mark.parametrize("name", NAMES)
def test_what_came_off_the_meta_device_runs_only_after_it_was_given_values(name):
    with torch.device("meta"):
        block = jpmhc.HyperConnection(nn.Identity(), DIM, N, name, index=1, dynamic=name != "grassmann")
    block.to_empty(device="cpu")
    x = torch.randn(3, N, DIM)
    with pytest.raises(RuntimeError, match=r"call reset_parameters\(\) or load a"):
        block(x)
    block.reset_parameters()
    fresh = jpmhc.HyperConnection(nn.Identity(), DIM, N, name, index=1, dynamic=name != "grassmann")
    assert torch.equal(block(x), fresh(x))


def test_device_and_type_of_the_coefficients_can_be_given():
    assert jpmhc.HyperConnection(None, DIM, N, device="meta").map.bias.is_meta
    assert jpmhc.HyperConnection(None, DIM, N, dtype=torch.float64).map.weight.dtype == torch.float64
    assert jpmhc.HyperConnection(None, DIM, N, dtype=torch.bfloat16).map.weight.dtype == torch.float32


def test_a_checkpoint_of_version_0_1_loads():
    block = perturbed(mixer="cayley")
    state = {key.replace("map.bias", "map.logits"): value for key, value in block.state_dict().items()}
    other = perturbed(mixer="cayley", temperature=1.0)
    other.reset_parameters()
    other.load_state_dict(state)
    assert torch.equal(other.map.bias, block.map.bias)


def test_the_norm_and_the_read_have_their_eps():
    torch.manual_seed(0)
    block = jpmhc.HyperConnection(None, 8, 4, index=0, read="sigmoid", eps=0.5, read_eps=0.01, dtype=torch.float64)
    assert torch.allclose(block.coefficients(torch.randn(3, 4, 8)).read.sum(-1), torch.ones((), dtype=torch.float64))
    torch.nn.init.normal_(block.map.weight)
    x = torch.randn(5, 4, 8, dtype=torch.float64)
    normed = x.flatten(1) / (x.flatten(1).square().mean(-1, keepdim=True) + 0.5).sqrt()
    logits = normed @ block.map.weight.T / 32**0.5 + block.map.bias
    torch.testing.assert_close(block.coefficients(x).read, logits[:, :4].sigmoid() + 0.01)
    with pytest.raises(ValueError, match='read_eps goes with read="sigmoid"'):
        jpmhc.HyperConnection(None, 8, 4, read_eps=0.01)


def test_a_part_of_the_values_is_not_enough():
    block = jpmhc.HyperConnection(None, 8, 4, device="meta").to_empty(device="cpu")
    block.load_state_dict({"map.bias": torch.zeros(len(block.map.bias))}, strict=False)
    with pytest.raises(RuntimeError, match="holds no values yet"):
        block.read(torch.randn(2, 4, 8))


def test_assigned_coefficients_stay_float32():
    block = jpmhc.HyperConnection(None, 8, 4)
    half = {name: value.bfloat16() for name, value in block.state_dict().items()}
    block.load_state_dict(half, assign=True)
    assert {value.dtype for value in block.state_dict().values()} == {torch.float32}
    x = torch.randn(2, 4, 8).bfloat16()
    assert block.write(x, *block.read(x)).dtype == torch.bfloat16
