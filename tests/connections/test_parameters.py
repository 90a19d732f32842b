"""Weight decay stays off mixing logits, frames, norms and biases; a plain model's weights load."""

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


DIM, N = 8, 4


class Plain(nn.Module):
    """A head after layers with residuals."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(DIM, DIM) for _ in range(3))
        self.head = nn.Linear(DIM, 2)

    def forward(self, x):
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x)


class Connected(nn.Module):
    """The same with connections, under the same name or another."""

    def __init__(self, name="layers"):
        super().__init__()
        layers = (jpmhc.HyperConnection(nn.Linear(DIM, DIM), DIM, N, "sinkhorn", index=k) for k in range(3))
        self.add_module(name, jpmhc.HyperConnectionStack(layers, expand=True, reduce=True))
        self.name, self.head = name, nn.Linear(DIM, 2)

    def forward(self, x):
        return self.head(getattr(self, self.name)(x))


@pytest.mark.parametrize(
    ("name", "rename"),
    [
        ("layers", None),
        ("body", {"layers.": "body."}),
        ("body", {"layers.": "body.connections.", "layers.1.": "body.1."}),
    ],
)
def test_the_connected_model_computes_what_the_plain_one_did(name, rename):
    plain, model = Plain(), Connected(name)
    weights = plain.state_dict()
    if rename is not None and len(rename) == 2:  # names in full for one half, in short for the other
        rename = {f"layers.{k}.": f"body.connections.{k}.sublayer." for k in (0, 2)} | {"layers.1.": "body.1."}
    jpmhc.load_plain_weights(model, weights, rename)
    x = torch.randn(5, DIM)
    assert torch.allclose(model(x), plain(x), atol=1e-5)


def test_a_forgotten_rename_names_both_sides_and_loads_nothing():
    model = Connected("body")
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(
        ValueError, match=r"6 \(body\.0\.weight, .* without a value, 6 \(layers\.0\.weight, .* {'their beg"
    ):
        jpmhc.load_plain_weights(model, Plain().state_dict())
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


def test_another_shape_is_named_and_nothing_is_loaded():
    model, weights = Connected(), Plain().state_dict()
    weights["head.weight"] = torch.zeros(3, DIM)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(ValueError, match=r"^head\.weight of the model has the shape \[2, 8\], .* have \[3, 8\] for it"):
        jpmhc.load_plain_weights(model, weights)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


def test_a_beginning_that_no_weight_has_is_refused():
    with pytest.raises(ValueError, match=r"no weight's name begins with 'zzz\.'; the first one is 'layers\.0\.weight'"):
        jpmhc.load_plain_weights(Connected(), Plain().state_dict(), rename={"zzz.": "body."})


def test_what_is_no_dict_is_refused():
    model = nn.Linear(2, 2)
    with pytest.raises(ValueError, match=r"weights must be a plain model's state_dict\(\), got Linear"):
        jpmhc.load_plain_weights(model, model)
    with pytest.raises(ValueError, match="rename must be a dict of beginnings of names, got list"):
        jpmhc.load_plain_weights(model, model.state_dict(), ["a"])
