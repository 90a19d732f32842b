"""The whole diagnosis: any module, the plan that is said, and a verdict that is right about known sickness."""

import copy

import numpy as np
import pytest
import torch
from torch import nn

import jpmhc
from jpmhc.diagnose import measure, run
from jpmhc.experiments.models.recursive import RecursiveConfig, RecursiveCore
from tests.diagnose.models import Residual, StreamNet, TinyLanguageModel, linear_network, make_mlp
from tests.own import Shrinking


def test_the_plan_is_said_before_and_the_verdict_has_five_sentences():
    torch.manual_seed(0)
    said = []
    found = jpmhc.diagnose(StreamNet(), torch.randn(1, 3, 12), say=said.append)
    assert said[0] == "from the model's input to the model's output"
    assert any(line.startswith("the whole map: 36 x 36, dense, 36 backward passes, about") for line in said)
    assert said[-1].startswith("in all about")
    assert len(found.verdict) == 5
    assert all(line.endswith(".") for line in found.verdict)
    text = str(found)
    assert all(line in text for line in found.verdict)
    assert "stack.connections.3" in text
    assert "product of all skips" in text
    for part in (found, found.comparisons[0], found.comparisons[0].predicted, found.whole):
        assert repr(part).startswith(f"{type(part).__name__}(")
        assert len(repr(part)) < 400


def test_no_layers_between_the_ends_is_said():
    found = jpmhc.diagnose(TinyLanguageModel(), torch.zeros(1, 3, dtype=int), between=("layers.1", "norm"), say=None)
    assert "there are no layers between the output of layers.1 and the output of norm" in found.verdict[3]


def test_a_healthy_network_is_called_healthy():
    torch.manual_seed(0)
    found = jpmhc.diagnose(StreamNet(dim=24, depth=3, spread=0.0), torch.randn(1, 2, 24), tokens=1, say=None)
    assert found.verdict[0].startswith("Healthy")
    assert found.verdict[1].startswith("No collapse")
    assert found.verdict[2].startswith("Nothing explodes")
    assert "gradients reach all layers alike" in found.verdict[3]


class Halving(Shrinking):
    def forward(self, logits):
        return super().forward(logits) / 2


def test_skips_that_shrink_every_stream_are_called_the_cause():
    torch.manual_seed(0)
    connections = [jpmhc.HyperConnection(make_mlp(24), 24, 4, Halving(4), index=k) for k in range(6)]
    stack = jpmhc.HyperConnectionStack(connections, expand=True, reduce=True)
    found = jpmhc.diagnose(stack, torch.randn(1, 2, 24), tokens=1, say=None)
    assert float(found.streams.product[0]) == pytest.approx(1 / 64)
    assert found.verdict[1].endswith(
        "are lost: the skips' product shrinks every stream to at most 0.016 of its size, and the sublayers' outputs "
        "outweigh what is left."
    )


def test_many_streams_do_not_hide_that_the_models_own_map_is_not_as_predicted():
    """Three times the same sublayer, which the theory takes for three: of eight streams it moves one, the mean."""
    torch.manual_seed(0)
    weight = torch.randn(24, 24)
    connections = [jpmhc.HyperConnection(nn.Linear(24, 24, False), 24, 8, "identity", index=k) for k in range(3)]
    for block in connections:
        block.sublayer.weight.data.copy_(0.3 * (weight + weight.T) / 48**0.5)
    stack = jpmhc.HyperConnectionStack(connections, expand=True, reduce=True)
    found = jpmhc.diagnose(stack, torch.randn(1, 1, 24), tokens=1, say=None)
    (item,) = found.comparisons
    assert item.kolmogorov < 0.05 < item.own.kolmogorov
    assert "the bulk is not as the theory predicts (all streams: KS 0.0" in found.verdict[4]
    assert f"the model's own map: KS {item.own.kolmogorov:.2g})" in found.verdict[4]
    top, theory = item.own.measured.quantile(0.99), item.own.predicted.quantile(0.99)
    assert top > 1.5 * theory
    assert f"99 % quantile of the model's own map: {top:.2g}, predicted {theory:.2g}" in found.verdict[4]
    assert "between the streams hardly anything is lost (0.5%)" in found.verdict[1]


def test_forgotten_stream_differences_are_told_from_the_models_own_map():
    torch.manual_seed(0)
    model = StreamNet(dim=16, depth=6, mixer="sinkhorn")
    for block in model.stack.connections:
        nn.init.normal_(block.map.bias)
    found = jpmhc.diagnose(model, torch.randn(1, 2, 16), tokens=1, say=None)
    assert found.verdict[1].startswith("No collapse of the model's own map")
    assert "75% are lost: differences between streams" in found.verdict[1]
    assert found.comparisons[0].measured.below() == pytest.approx(0.75, abs=0.02)


def test_collapse_explosion_and_fading_gradients_are_found():
    model, _ = linear_network(40, 5)
    with torch.no_grad():
        model[2].weight[:10] *= 1e-4
    assert jpmhc.diagnose(model, torch.randn(1, 40), say=None).verdict[1].startswith("Collapse: 25.0%")
    with torch.no_grad():
        model[2].weight[:10] *= 1e7
    found = jpmhc.diagnose(model, torch.randn(1, 40).clamp(-1e-3, 1e-3), say=None)
    assert "2 has the largest gain" in found.verdict[3]
    fading, _ = linear_network(40, 5)
    with torch.no_grad():
        for layer in fading:
            layer.weight.mul_(0.3)
    layers = jpmhc.diagnose(fading, torch.randn(1, 40), say=None).verdict[3]
    assert "gradients are uneven" in layers
    assert "e+0" not in layers.partition(", the weakest")[0]  # a factor of thousands is a whole number


def test_the_theorys_gradients_stand_beside_the_measured_ones():
    """With random linear sublayers and coefficients that are far from the start, so that gradients differ by layer."""
    torch.manual_seed(0)
    dim, depth = 64, 5
    blocks = [
        jpmhc.HyperConnection(nn.Linear(dim, dim, bias=False), dim, 4, "sinkhorn", index=index, dynamic=False)
        for index in range(depth)
    ]
    with torch.no_grad():
        for block in blocks:
            block.sublayer.weight.normal_(std=0.5 / dim**0.5)
            for parameter in block.map.parameters():
                parameter.add_(torch.randn_like(parameter))
    stack = jpmhc.HyperConnectionStack(blocks, reduce=True)
    found = jpmhc.diagnose(stack, torch.randn(1, 4, dim), tokens=1, say=None)
    measured, predicted = ([getattr(layer, name) for layer in found.layers] for name in ("gradient", "predicted"))
    assert max(measured) > 2 * min(measured)
    assert predicted[-1] == pytest.approx(measured[-1])
    assert predicted == pytest.approx(measured, rel=0.2)
    assert "theory" in next(line for line in str(found).splitlines() if line.startswith("layer "))


def test_layers_that_share_weights_are_noted():
    layer = nn.Linear(8, 8)
    found = jpmhc.diagnose(nn.Sequential(layer, nn.Linear(8, 8), layer), torch.randn(1, 8), say=None)
    (note,) = found.notes
    assert note.startswith("some layers share their weights")
    assert [layer.name for layer in found.layers] == ["0 (call 1)", "1", "0 (call 2)"]
    assert len(found.comparisons[0].gains) == 3


def test_layers_on_images_are_never_rotated():
    layers = [nn.Conv2d(2, 2, 3, padding=1) for _ in range(2)]
    found = jpmhc.diagnose(nn.Sequential(*layers), torch.randn(1, 2, 4, 4), say=None)
    assert found.comparisons[0].rotated is None
    assert [note for note in found.notes if note.endswith("not rotated: they have no matrix at a single position")]


def test_a_compiled_or_wrapped_container_is_looked_into():
    model = TinyLanguageModel().eval()
    tokens = torch.randint(0, 20, (1, 4))
    plain = jpmhc.diagnose(model, tokens, tokens=1, say=None)
    compiled = jpmhc.diagnose(torch.compile(model), tokens, tokens=1, say=None)
    np.testing.assert_array_equal(plain.whole.values, compiled.whole.values)


def test_a_wrapped_model_is_measured_at_its_connections():
    torch.manual_seed(0)
    model = TinyLanguageModel().eval()
    tokens = torch.randint(0, 20, (1, 4))
    plain = jpmhc.diagnose(copy.deepcopy(model), tokens, tokens=1, say=None)
    found = jpmhc.diagnose(jpmhc.wrap(model, streams=4, mixer="sinkhorn", inputs=tokens), tokens, tokens=1, say=None)
    assert len(found.layers) == 4
    assert found.comparisons[0].blocks.shape == (4, 4)
    np.testing.assert_allclose(found.whole.values, plain.whole.values, rtol=1e-3, atol=1e-5)


def test_a_hugging_face_model_is_diagnosed():
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, vocab_size=30
    )
    model = transformers.LlamaForCausalLM(config).eval().bfloat16()
    found = jpmhc.diagnose(
        model, {"input_ids": torch.arange(5)[None]}, between=(None, "model.norm"), tokens=1, say=None
    )
    assert found.start.startswith("the embeddings (model.embed_tokens")
    assert found.whole.shape == (80, 80)
    assert [layer.name for layer in found.layers] == ["model.layers.0", "model.layers.1"]
    assert not found.notes


def test_streams_of_a_token_belong_together():
    ends = ("stack.connections.0", "stack.connections.3")
    found = jpmhc.diagnose(StreamNet(), torch.randn(2, 12), between=ends, say=None)
    assert found.whole.shape == (2 * 48, 2 * 48)
    assert set(found.tokens) == {0, 1}
    assert found.tokens[0].shape == (48, 48)


@pytest.mark.parametrize("mixer", ["identity", "cayley"])
def test_the_recursive_model_is_measured_from_its_first_call_with_gradients(mixer):
    """Of two outer cycles only the last has gradients: network calls 3 (of 0 … 5) to 5, then the head."""
    torch.manual_seed(0)
    streams = 1 if mixer == "identity" else 4
    config = RecursiveConfig(
        dim=8,
        heads=2,
        layers=1,
        h_cycles=2,
        l_cycles=2,
        mixer=mixer,
        streams=streams,
        puzzle_slots=1,
        compute="float32",
    )
    core = RecursiveCore(config, vocabulary=5, length=3)
    states = [state.contiguous() for state in core.initial_states(1)]
    tokens, one = torch.tensor([[1, 2, 3]]), torch.ones(1, dtype=torch.int32)
    inputs = (torch.randn(1, 8), tokens, tokens, *states, one, one.bool(), one)
    found = jpmhc.diagnose(core, inputs, between=("network", "token_head"), tokens=1, say=None)
    assert found.whole.shape == (3 * 5, 4 * 8)

    x = core.embed_rows(inputs[0], tokens)
    seen = []
    handle = core.network.register_forward_hook(lambda module, given, output: seen.append(output.detach()))
    with torch.no_grad():
        core.run_supervision_step(inputs[0], tokens, *states)
    handle.remove()
    assert len(seen) == 6

    def rest(z_l):
        z_h = seen[2]
        z_l = core.apply_network(z_l, z_h + x)
        return core.token_head(core.apply_network(z_h, z_l)[:, 1:])

    exact = torch.autograd.functional.jacobian(rest, seen[3]).reshape(15, 32)
    np.testing.assert_allclose(found.whole.values[0], torch.linalg.svdvals(exact).flip(0), rtol=1e-3, atol=1e-6)


def test_a_batch_that_does_not_fit_is_cut(monkeypatch):
    model = nn.Sequential(nn.Linear(100, 100), nn.Tanh(), nn.Linear(100, 100))
    x = torch.randn(400, 100)
    monkeypatch.setattr(run, "free_memory", lambda device: 30_000)
    found = jpmhc.diagnose(model, x, method="lanczos", probes=2, steps=4, say=None)
    cut = found.whole.shape[0] // 100
    assert 1 <= cut < 400
    assert f"the batch of 400 does not fit into memory: its first {cut} are measured" in found.notes


def test_few_integers_stand_for_many_numbers_of_a_batch(monkeypatch):
    monkeypatch.setattr(run, "free_memory", lambda device: 30_000)
    model, words = nn.Sequential(nn.Embedding(9, 20), nn.Tanh()), torch.arange(160).view(40, 4) % 9
    found = jpmhc.diagnose(model, words, method="lanczos", tokens=1, probes=2, steps=4, say=None)
    assert any("the batch of 40 does not fit into memory" in note for note in found.notes)


def test_a_short_time_limit_gives_a_smaller_plan_and_says_so():
    model, _ = linear_network(600, 3)
    said = []
    found = jpmhc.diagnose(model, torch.randn(1, 600), seconds=1e-3, say=said.append)
    assert found.whole.method == "lanczos"
    assert found.whole.values.shape == (2, 24)
    assert "2 probes of 24 steps (shortened to keep to the limit)" in said[1]
    assert any("sublayers are not rotated" in note for note in found.notes)
    assert found.comparisons[0].rotated is None
    assert "too costly" in found.verdict[4]


def test_single_tokens_that_would_take_too_long_are_left_out(monkeypatch):
    monkeypatch.setattr(measure, "_BEARABLE", 0.0)
    found = jpmhc.diagnose(StreamNet(), torch.randn(1, 3, 12), seconds=1e-4, say=None)
    assert not found.tokens
    assert not found.comparisons
    assert len(found.layers) == 4
    assert sum("are left out" in note for note in found.notes) == 2
    assert found.modes.count == 0
    assert "too costly" in found.verdict[4]


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"method": "guess"}, "choose one of auto, dense, lanczos"),
        ({"tokens": 0}, "tokens must be a whole number"),
        ({"seconds": -1}, "seconds must be positive"),
    ],
)
def test_options_are_checked(options, sentence):
    with pytest.raises(ValueError, match=sentence):
        jpmhc.diagnose(nn.Linear(2, 2), torch.randn(1, 2), **options)


def test_a_single_layer_is_compared_with_nothing():
    torch.manual_seed(0)
    found = jpmhc.diagnose(jpmhc.HyperConnection(nn.Linear(8, 8), 8), torch.randn(1, 3, 4, 8), say=None)
    assert "is the only one" in found.verdict[3]
    assert "nothing to predict: there is one layer" in found.verdict[4]


def test_connections_around_one_sublayer_share_its_weights():
    torch.manual_seed(0)
    sublayer = nn.Linear(8, 8)
    blocks = [jpmhc.HyperConnection(sublayer, 8, index=index) for index in range(3)]
    model = jpmhc.HyperConnectionStack(blocks, expand=True, reduce=True)
    found = jpmhc.diagnose(model, torch.randn(1, 3, 8), say=None)
    assert any("some layers share their weights" in note for note in found.notes)


def test_how_many_layers_the_theory_was_compared_on_is_said():
    class Between(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(5))

        def forward(self, x):
            for number, layer in enumerate(self.layers):
                x = layer(x) if number < alone else layer(x).tanh()
            return x

    torch.manual_seed(0)
    alone = 0
    found = jpmhc.diagnose(Between(), torch.randn(2, 3, 8), say=None)
    assert "nothing to predict: no layer gets the output of another one unchanged" in found.verdict[-1]
    alone = 2
    found = jpmhc.diagnose(Between(), torch.randn(2, 3, 8), say=None)
    assert "the bulk through 3 of 5 layers is" in found.verdict[-1]


@pytest.mark.parametrize("kind", ["xavier", "torch", "gpt2", "mup"])
def test_fresh_networks_are_not_called_collapsed(kind):
    """48 pre-norm layers and a norm: a tenth of the signal's gain counted 17 to 39 % of directions as collapsed."""
    torch.manual_seed(0)
    dim, depth = 48, 48
    layers = [Residual(nn.Sequential(nn.LayerNorm(dim), *make_mlp(dim, 4)[1:])) for _ in range(depth)]
    for layer in layers:
        for number, name in ((1, "first"), (3, "last")):
            weight = layer.sublayer[number].weight
            if kind == "xavier":
                nn.init.xavier_uniform_(weight)
            elif kind == "gpt2":
                nn.init.normal_(weight, std=0.02 / ((2 * depth) ** 0.5 if name == "last" else 1))
            elif kind == "mup":
                nn.init.normal_(weight, std=1 / weight.shape[1] ** 0.5 / (depth**0.5 if name == "last" else 1))
    found = jpmhc.diagnose(nn.Sequential(nn.Sequential(*layers), nn.LayerNorm(dim)), torch.randn(1, dim), say=None)
    assert found.verdict[0].startswith("Healthy")
    assert not found.verdict[1].startswith("Collapse")


def test_directions_that_norms_take_from_few_features_are_no_collapse():
    """A layer norm takes two of four features: half of the directions, and the verdict says why it is healthy."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.LayerNorm(4))
    found = jpmhc.diagnose(model, torch.randn(1, 4), say=None)
    assert found.verdict[0].startswith("Healthy")
    assert "50.0% of the map's directions" in found.verdict[1]
    assert "norms alone take up to 50.0%" in found.verdict[1]


def test_the_scale_of_a_post_norm_is_no_loss_of_the_skips():
    """The product of twelve rotations has singular values 1, however much the norms after the writes divide by."""
    torch.manual_seed(0)
    model = StreamNet(dim=16, depth=12, mixer="rotation", post_norm="rms")
    with torch.no_grad():
        for block in model.stack.connections:
            block.sublayer[3].weight.mul_(4)
    found = jpmhc.diagnose(model, torch.randn(1, 2, 16), tokens=1, say=None)
    torch.testing.assert_close(found.streams.product, torch.ones(4, dtype=torch.float64), rtol=0, atol=1e-5)
    assert found.streams.geometric_mean == pytest.approx(1, abs=1e-5)
    assert "the skips forget" not in found.verdict[1]


def test_gradients_that_differ_by_a_factor_are_not_called_alike():
    model, _ = linear_network(40, 5)
    with torch.no_grad():
        for layer in model:
            layer.weight.mul_(0.7)
    assert (
        "gradients reach all layers: squared, they differ"
        in jpmhc.diagnose(model, torch.randn(1, 40), say=None).verdict[3]
    )
