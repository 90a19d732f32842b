"""Weight decay stays off mixing logits, frames, norms and biases."""

import pytest
import torch
from torch import nn

import jpmhc


def test_groups_part_the_parameters():
    model = nn.Sequential(
        nn.LayerNorm(8),
        jpmhc.HyperConnection(nn.Linear(8, 8), 8, 4, "grassmann", dynamic=False),
        jpmhc.HyperConnection(nn.Linear(8, 8), 8, 4, "cayley"),
    )
    decayed, kept = jpmhc.parameter_groups(model, 0.1)
    assert decayed["weight_decay"] == 0.1
    assert kept["weight_decay"] == 0
    names = {id(p): name for name, p in model.named_parameters()}
    assert {names[id(p)] for p in decayed["params"]} == {"1.sublayer.weight", "2.sublayer.weight", "2.map.weight"}
    assert {names[id(p)] for p in kept["params"]} == {
        "0.weight",
        "0.bias",
        "1.sublayer.bias",
        "1.map.bias",
        "1.map.mixer.frame",
        "2.sublayer.bias",
        "2.map.bias",
    }


def test_decay_leaves_the_mixer_at_its_start():
    block = jpmhc.HyperConnection(nn.Linear(8, 8), 8, 4, "sinkhorn", index=0)
    x = torch.zeros(1, 4, 8)
    before = block.coefficients(x).skip
    optimizer = torch.optim.AdamW(jpmhc.parameter_groups(block, 1.0), lr=0.1)
    for parameter in block.parameters():
        parameter.grad = torch.zeros_like(parameter)
    for _ in range(50):
        optimizer.step()
    assert torch.equal(block.coefficients(x).skip, before)
    assert block.sublayer.weight.norm() < 0.01


def test_negative_decay_is_refused():
    with pytest.raises(ValueError, match="weight_decay must be finite and not negative"):
        jpmhc.parameter_groups(nn.Linear(2, 2), -0.1)


def test_parameters_in_place_of_the_model_are_refused():
    with pytest.raises(ValueError, match="takes the model itself, got generator"):
        jpmhc.parameter_groups(nn.Linear(2, 2).parameters(), 0.1)


def test_projections_apart_leave_hidden_matrices():
    model = nn.Sequential(nn.Embedding(3, 8), jpmhc.HyperConnection(nn.Linear(8, 8), 8, 4))
    matrices, projections, kept = jpmhc.parameter_groups(model, 0.1, projections_apart=True)
    assert [id(p) for p in matrices["params"]] == [id(model[0].weight), id(model[1].sublayer.weight)]
    assert [id(p) for p in projections["params"]] == [id(model[1].map.weight)]
    assert {id(p) for p in kept["params"]} == {id(model[1].map.bias), id(model[1].sublayer.bias)}
    assert [group["weight_decay"] for group in (matrices, projections, kept)] == [0.1, 0.1, 0]
