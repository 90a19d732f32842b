"""A diagnosis leaves the model, its gradients and all random numbers as they were."""

import random

import numpy as np
import pytest
import torch
from torch import nn

import jpmhc
from tests.diagnose.models import StreamNet


def make_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Dropout(0.5), nn.Linear(6, 6))


@pytest.mark.parametrize("training", [True, False])
def test_everything_is_left_as_it_was(training):
    model = make_model().train(training)
    model(torch.randn(5, 6)).sum().backward()
    parameters, gradients = list(model.parameters()), [p.grad for p in model.parameters()]
    state = {name: value.clone() for name, value in model.state_dict().items()}
    grown = [gradient.clone() for gradient in gradients]
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].copy()  # noqa: NPY002
    x = torch.randn(5, 6)
    kept = x.clone()
    torch.set_rng_state(before[0])
    jpmhc.diagnose(model, x, tokens=1, say=None)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert random.getstate() == before[1]
    assert (np.random.get_state()[1] == before[2]).all()  # noqa: NPY002
    assert all(new is old for new, old in zip(model.parameters(), parameters))
    assert all(p.grad is g and torch.equal(g, c) for p, g, c in zip(parameters, gradients, grown))
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert torch.equal(x, kept)
    assert not x.requires_grad
    assert model.training == training
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_connections_get_their_own_form_back():
    model = StreamNet()
    jpmhc.diagnose(model, torch.randn(1, 12), tokens=1, say=None)
    for block in model.stack.connections:
        assert "form" not in vars(block)
        assert not block._forward_pre_hooks


def test_a_failure_leaves_the_model_as_it_was_too():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    parameters = list(model.parameters())
    with pytest.raises(ValueError, match="does not depend"):
        jpmhc.diagnose(model, torch.randn(2, 4), between=("1", "0"), tokens=1, say=None)
    assert all(new is old for new, old in zip(model.parameters(), parameters))


def test_half_precision_is_computed_in_float32():
    model = StreamNet().eval()
    wide = jpmhc.diagnose(model.bfloat16().float(), torch.ones(1, 12), tokens=1, say=None)
    half = jpmhc.diagnose(model.bfloat16(), torch.ones(1, 12, dtype=torch.bfloat16), tokens=1, say=None)
    assert {p.dtype for p in model.stack.connections[0].sublayer.parameters()} == {torch.bfloat16}
    np.testing.assert_allclose(half.whole.values, wide.whole.values, rtol=1e-4)


def test_dropout_draws_the_same_mask_in_every_run():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), nn.Dropout(0.5)).train()
    found = jpmhc.diagnose(model, torch.randn(1, 16), method="dense", tokens=1, say=None).whole
    dropped = int((found.values < 1e-6).sum())
    assert 0 < dropped < 16  # the rows of the mask
    quadrature = jpmhc.diagnose(model, torch.randn(1, 16), method="lanczos", steps=16, tokens=1, say=None).whole
    assert quadrature.largest == pytest.approx(found.largest, rel=1e-4)
