"""The lens of a model with streams: against the exact map, and against the average of dense Jacobians."""

import pytest
import torch
from torch import nn

import jpmhc
from jpmhc.diagnose import Lens
from tests.diagnose.models import Residual, StreamNet, TinyLanguageModel, make_mlp


class Attention(nn.Module):
    """Attention to all tokens."""

    def __init__(self, dim):
        super().__init__()
        self.queries, self.keys, self.values = (nn.Linear(dim, dim) for _ in range(3))

    def forward(self, x):
        return (self.queries(x) @ self.keys(x).mT).softmax(-1) @ self.values(x)


def linear_stack(depth=5, dim=12):
    """Return connections with constant coefficients, far from their start, around linear sublayers."""
    torch.manual_seed(0)
    blocks = [
        jpmhc.HyperConnection(nn.Linear(dim, dim), dim, 4, "cayley", index=index, dynamic=False)
        for index in range(depth)
    ]
    with torch.no_grad():
        for block in blocks:
            block.map.bias.add_(0.5 * torch.randn_like(block.map.bias))
    return jpmhc.HyperConnectionStack(blocks, expand=True, reduce=True)


@pytest.mark.parametrize("rank", [None, 12])
def test_the_lens_of_a_linear_model_is_its_rest(rank):
    model = linear_stack()
    prompts = [torch.randn(2, 3, 12) for _ in range(3)]
    lens = jpmhc.diagnose.lens(model, "connections.1", prompts, rank=rank, say=None)
    assert (lens.layer, lens.tokens, tuple(lens.matrix.shape)) == ("connections.1", 18, (12, 4, 12))
    x = torch.randn(2, 3, 12)
    torch.testing.assert_close(lens.read(model, x), model(x), rtol=1e-4, atol=1e-5)


def test_the_lens_is_the_average_of_the_tokens_own_jacobians():
    """With attention: random signs cancel the derivatives by other tokens, on average over repeated prompts."""
    torch.manual_seed(0)
    attention = Attention(8)
    blocks = [
        jpmhc.HyperConnection(layer, 8, 2, "sinkhorn", index=k) for k, layer in enumerate((make_mlp(8), attention))
    ]
    model = jpmhc.HyperConnectionStack(blocks, expand=True, reduce=True).eval()
    x = torch.randn(1, 3, 8)
    lens = jpmhc.diagnose.lens(model, 0, [x] * 150, say=None)
    with torch.no_grad():
        streams = blocks[0](jpmhc.expand_streams(x, 2))
    exact = torch.autograd.functional.jacobian(lambda s: jpmhc.reduce_streams(blocks[1](s)), streams)
    own = torch.stack([exact[0, t, :, 0, t] for t in range(3)]).mean(0)  # [8, 2, 8]
    others = exact.square().sum().sqrt()
    assert float((lens.matrix - own).norm() / others) < 0.08


def test_a_low_rank_finds_the_few_directions_that_layers_add():
    """Sublayers of rank one: the rest of the model differs from the mean of the streams by few directions."""
    torch.manual_seed(0)
    layers = [nn.Linear(12, 12, bias=False) for _ in range(3)]
    with torch.no_grad():
        for layer in layers:
            layer.weight.copy_(torch.outer(torch.randn(12), torch.randn(12)) / 12)
    blocks = [jpmhc.HyperConnection(layer, 12, 4, "identity", index=k) for k, layer in enumerate(layers)]
    model = jpmhc.HyperConnectionStack(blocks, expand=True, reduce=True)
    said, prompts = [], [torch.randn(1, 4, 12) for _ in range(5)]
    few = jpmhc.diagnose.lens(model, 0, prompts, rank=2, say=said.append)
    full = jpmhc.diagnose.lens(model, 0, prompts, say=None)
    assert said[0].startswith("5 prompts of 2 rows and columns each: about a second")
    torch.testing.assert_close(few.matrix, full.matrix, rtol=1e-4, atol=1e-5)


def test_a_lens_is_saved_and_loaded(tmp_path):
    lens = jpmhc.diagnose.lens(linear_stack(), 2, [torch.randn(1, 2, 12)], say=None)
    loaded = Lens.load(lens.save(tmp_path / "lens.pt"))
    streams = torch.randn(5, 4, 12)
    assert torch.equal(loaded(streams), lens(streams))
    assert repr(loaded) == repr(lens)


def test_a_plain_language_model_has_a_lens_too():
    torch.manual_seed(0)
    model = TinyLanguageModel().eval()
    prompts = [torch.randint(0, 20, (1, 5)) for _ in range(3)]
    weights = [parameter.detach().clone() for parameter in model.parameters()]
    lens = jpmhc.diagnose.lens(model, "layers.0", prompts, say=None)
    assert tuple(lens.matrix.shape) == (16, 1, 16)
    assert lens.read(model, prompts[0]).shape == (1, 5, 16)
    assert all(torch.equal(a, b) for a, b in zip(weights, model.parameters()))


def test_a_fitted_lens_reads_the_part_that_does_not_grow_with_the_streams():
    """W x / |x| has no derivative by the length of x, here the largest feature's: its sign is all that W adds to x."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Identity(), Residual(nn.Sequential(nn.RMSNorm(12), nn.Linear(12, 12))))
    x = torch.randn(1400, 12)
    x[:, 0] = 9 * x[:, 0].sign()
    prompts, x = x[:1000].split(5), x[1000:]

    def miss(prompts, fit):
        lens = jpmhc.diagnose.lens(model, 0, prompts, fit=fit, say=None)
        return float((lens.read(model, x) - model(x)).detach().square().mean())

    assert miss(prompts, True) < 0.1 * miss(prompts, False)
    assert miss(prompts[:1], True) < miss(prompts[:1], False)  # fewer tokens than features
    with pytest.raises(ValueError, match="rank is for a lens of derivatives"):
        jpmhc.diagnose.lens(model, 0, prompts, fit=True, rank=2, say=None)


@pytest.mark.parametrize("layer", [2, "0 (call 2)"])
def test_a_layer_that_is_called_twice_has_a_lens_for_each_call(layer):
    torch.manual_seed(0)
    shared = nn.Linear(6, 6)
    model, x = nn.Sequential(shared, nn.Linear(6, 6), shared, nn.Linear(6, 6)), torch.randn(3, 6)
    lens = jpmhc.diagnose.lens(model, layer, [x], say=None)
    assert lens.layer == "0 (call 2)"
    torch.testing.assert_close(lens.matrix[:, 0], model[3].weight.detach())
    torch.testing.assert_close(lens.read(model, x), model(x).detach())


@pytest.mark.parametrize(
    ("layer", "options", "sentence"),
    [
        ("stack.connections.9", {}, "one of the layers before the last, by name or by number from 0, not 'stack.conn"),
        (3, {}, r"not 3; this model has stack\.connections\.0, stack\.connections\.1"),
        (0, {"rank": 0}, "rank must be a whole number"),
    ],
)
def test_layers_that_are_not_there_are_refused(layer, options, sentence):
    with pytest.raises(ValueError, match=sentence):
        jpmhc.diagnose.lens(StreamNet(), layer, [torch.randn(1, 12)], say=None, **options)


def test_other_bad_input_is_one_sentence(tmp_path):
    for prompts, kind in (([], "an empty one"), (torch.randn(1, 12), "a Tensor")):
        with pytest.raises(ValueError, match=f"prompts must be a list of inputs of the model, not {kind}"):
            jpmhc.diagnose.lens(StreamNet(), 0, prompts, say=None)
    torch.save({"weights": 1}, tmp_path / "other.pt")
    (tmp_path / "text.pt").write_text("hello")
    for name in ("other.pt", "text.pt"):
        with pytest.raises(ValueError, match=r"holds no lens: Lens\.save writes one"):
            Lens.load(tmp_path / name)
    with pytest.raises(ValueError, match="no list of layers: there is nothing to look into"):
        jpmhc.diagnose.lens(nn.Linear(2, 2), 0, [torch.randn(1, 2)], say=None)
    for fit in (False, True):
        with pytest.raises(ValueError, match="a prompt gives NaN or infinity after the last layer"):
            jpmhc.diagnose.lens(StreamNet(), 0, [torch.randn(2, 12), torch.full((2, 12), torch.nan)], fit=fit, say=None)
    lens = jpmhc.diagnose.lens(StreamNet(), 0, [torch.randn(2, 12)], say=None)
    with pytest.raises(ValueError, match=r"reads streams \[\.\.\., 4, 12\], not \[2, 12\]"):
        lens(torch.randn(2, 12))
    with pytest.raises(ValueError, match=r"this model has no layer stack\.connections\.0"):
        lens.read(TinyLanguageModel(), torch.zeros(1, 3, dtype=int))
