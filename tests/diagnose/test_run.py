"""Where the map begins and ends, and what is said of inputs and outputs that cannot be measured."""

import pytest
import torch
from torch import nn

import jpmhc
from tests.diagnose.models import TinyLanguageModel, linear_network


def diagnose(model, inputs, *args, **options):
    return jpmhc.diagnose(model, inputs, *args, say=None, **options)


def test_integer_inputs_are_measured_at_the_embeddings():
    torch.manual_seed(0)
    model = TinyLanguageModel().eval()
    tokens = torch.randint(0, 20, (1, 5))
    found = diagnose(model, tokens)
    assert found.start == "the embeddings (embed; the inputs are integers)"
    assert found.whole.shape == (5 * 16, 5 * 16)
    assert set(found.tokens) == {1, 4}

    def rest(x):
        for layer in model.layers:
            x = layer(x)
        return model.norm(x)

    exact = torch.autograd.functional.jacobian(rest, model.embed(tokens).detach()).reshape(80, 80)
    torch.testing.assert_close(
        torch.from_numpy(found.whole.values[0]).float(), torch.linalg.svdvals(exact).flip(0), rtol=1e-3, atol=1e-5
    )


def test_a_map_may_begin_inside_a_layer():
    """That layer has a part before the map, and is left out of the layers' table."""
    torch.manual_seed(0)
    model = TinyLanguageModel().eval()
    inner = next(name for name, module in model.named_modules() if name.startswith("layers.0.") and module is not model)
    found = diagnose(model, torch.randint(0, 20, (1, 5)), between=(inner, "norm"))
    assert found.start == f"the output of {inner}"
    assert [layer.name for layer in found.layers] == [f"layers.{k}" for k in range(1, len(model.layers))]


def test_between_two_modules_is_from_output_to_output():
    model, _ = linear_network(10, 4)
    found = diagnose(model, torch.randn(2, 10), between=("0", "2"))
    exact = torch.linalg.svdvals((model[2].weight @ model[1].weight).detach()).flip(0)
    torch.testing.assert_close(torch.from_numpy(found.tokens[0].values[0]).float(), exact, rtol=1e-4, atol=1e-5)
    half = diagnose(model, torch.randn(2, 10), between=(None, "0")).tokens[0]
    exact = torch.linalg.svdvals(model[0].weight.detach()).flip(0)
    torch.testing.assert_close(torch.from_numpy(half.values[0]).float(), exact, rtol=1e-4, atol=1e-5)


class Returns(nn.Module):
    """Returns whatever a function makes of a linear layer's output."""

    def __init__(self, make):
        super().__init__()
        self.linear, self.make = nn.Linear(4, 4), make

    def forward(self, x):
        return self.make(self.linear(x))


@pytest.mark.parametrize(
    "make",
    [lambda y: (y, 3), lambda y: {"logits": y, "other": None}, lambda y: {"loss": None, "last_hidden_state": y}],
)
def test_the_tensor_of_a_tuple_or_dict_is_the_output(make):
    assert diagnose(Returns(make), torch.randn(2, 4)).whole.shape == (8, 8)


def test_inputs_may_be_a_tensor_a_tuple_or_a_dict():
    model, x = nn.Bilinear(3, 3, 3), torch.randn(2, 3)
    shapes = [diagnose(model, inputs).whole.shape for inputs in ((x, x), {"input1": x, "input2": x})]
    assert shapes == [(6, 6), (6, 6)]


@pytest.mark.parametrize(
    ("model", "inputs", "between", "sentence"),
    [
        (nn.Linear(4, 4), "words", None, "inputs must be a tensor, a tuple of arguments or a dict of them, got str"),
        (lambda x: x, torch.randn(2, 4), None, "the model must be a torch.nn.Module, not a function"),
        (
            Returns(lambda y: "text"),
            torch.randn(2, 4),
            None,
            "the model's output is a str, and a tensor of real numbers",
        ),
        (Returns(lambda y: y.argmax(-1)), torch.randn(2, 4), None, "is a tensor of torch.int64"),
        (Returns(lambda y: y.detach()), torch.randn(2, 4), None, "does not depend on its input"),
        (nn.Linear(4, 4), torch.randn(0, 4), None, r"an input is an empty tensor, of shape \[0, 4\]"),
        (nn.Linear(4, 4), torch.randn(2, 5), None, "cannot be called with these inputs: mat1 and mat2 shapes"),
        (nn.Linear(4, 4), (torch.randn(2, 4), 3), None, "cannot be called with these inputs: .*takes 2 positional"),
        (nn.Embedding(4, 4), torch.tensor([[5]]), None, "cannot be called with these inputs: index out of range"),
        (Returns(lambda y: y), torch.randn(2, 4), ("line", None), "no module 'line' of this model; it has linear"),
        (Returns(lambda y: y), torch.randn(2, 4), "linear", "between must be two names of modules"),
        (nn.Unflatten(0, (2, 2)), torch.arange(4), None, "the inputs are integers and the model calls no nn.Embedding"),
        (nn.Linear(4, 4), torch.zeros(2, 4, dtype=torch.complex64), None, "the inputs are complex numbers: name a mod"),
        (nn.Linear(4, 4, device="meta"), torch.randn(2, 4), None, "the model is on the meta device"),
        (nn.Linear(4, 4), torch.randn(2, 4, device="meta"), None, "the inputs are on meta and the model is on cpu"),
    ],
)
def test_bad_input_is_one_sentence(model, inputs, between, sentence):
    with pytest.raises(ValueError, match=sentence):
        diagnose(model, inputs, between)


def test_nan_weights_are_named():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    with torch.no_grad():
        model[1].weight[0, 0] = torch.nan
    with pytest.raises(ValueError, match=r"the weights 1\.weight hold NaN"):
        diagnose(model, torch.randn(2, 4))


def test_a_module_that_is_not_called_is_named():
    model = Returns(lambda y: y)
    model.spare = nn.Linear(4, 4)
    with pytest.raises(ValueError, match="the output of spare takes no part"):
        diagnose(model, torch.randn(2, 4), between=("linear", "spare"))
    with pytest.raises(ValueError, match="the output of spare takes no part"):
        diagnose(model, torch.randn(2, 4), between=("spare", None))


@pytest.mark.gpu
def test_inputs_on_another_device_are_refused():
    with pytest.raises(ValueError, match="the inputs are on cpu and the model is on cuda:0"):
        diagnose(nn.Linear(4, 4).cuda(), torch.randn(2, 4))
