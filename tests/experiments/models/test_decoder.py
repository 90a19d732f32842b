"""The decoder: what it may look at, where it starts, and how wide it is."""

import dataclasses
import math

import pytest
import torch

from jpmhc import MIXERS
from jpmhc.experiments.models.decoder import Decoder, DecoderConfig, count_parameters

SMALL = DecoderConfig(dim=16, heads=2, layers=2, length=12, vocabulary=64)
INPUTS, LABELS = torch.randint(64, (2, 3, 12), generator=torch.Generator().manual_seed(0))


def make(mixer=None, **options):
    torch.manual_seed(0)
    connections = {} if mixer is None else {"mixer": mixer, "streams": 4}
    return Decoder(dataclasses.replace(SMALL, **connections, **options))


@pytest.mark.parametrize(
    "options", [{}, {"positions": "learned", "feed_forward": "gelu", "qk_norm": False}], ids=["default", "gpt"]
)
def test_every_mixer_starts_as_the_plain_decoder(options):
    plain = make(**options)(INPUTS, LABELS).item()
    assert plain == pytest.approx(math.log(64), abs=0.2)
    for mixer in MIXERS:
        assert make(mixer, **options)(INPUTS, LABELS).item() == pytest.approx(plain, rel=1e-5)


def test_delayed_reads_start_as_the_plain_decoder():
    plain = make()(INPUTS, LABELS).item()
    assert make("cayley", mixer_delayed=True)(INPUTS, LABELS).item() == pytest.approx(plain, rel=1e-5)


@pytest.mark.parametrize("mixer", [None, "cayley"])
@pytest.mark.parametrize("positions", ["rotary", "learned"])
def test_a_token_is_predicted_from_those_before_it(mixer, positions):
    model = make(mixer, positions=positions)
    changed = INPUTS.clone()
    changed[:, 7] = (changed[:, 7] + 1) % 64
    outputs = []
    model.head.register_forward_hook(lambda module, arguments, out: outputs.append(out))
    for tokens in (INPUTS, changed):
        model(tokens, tokens)
    same = torch.isclose(*outputs).all(-1).all(0)
    assert same.tolist() == [True] * 7 + [False] * 5


@pytest.mark.parametrize("positions", ["rotary", "learned"])
def test_the_order_of_tokens_matters(positions):
    model = make(positions=positions)
    outputs = []
    model.head.register_forward_hook(lambda module, arguments, out: outputs.append(out[0, -1]))
    swapped = INPUTS.clone()
    swapped[:, [0, 1]] = INPUTS[:, [1, 0]]
    for tokens in (INPUTS, swapped):
        model(tokens, tokens)
    assert not torch.allclose(*outputs)


@pytest.mark.parametrize(("feed_forward", "matrices"), [("swiglu", 3), ("gelu", 2)])
def test_extra_width_is_spread_over_the_layers(feed_forward, matrices):
    base = dataclasses.replace(SMALL, layers=4, feed_forward=feed_forward)
    config = dataclasses.replace(base, extra_inner=96)
    assert [a - b for a, b in zip(config.inner_widths(), base.inner_widths())] == [32, 32, 16, 16]
    assert count_parameters(config) - count_parameters(base) == matrices * 16 * 96


def test_hidden_matrices_are_those_of_the_layers():
    model = make("cayley")
    hidden = model.hidden_matrices()
    assert len(hidden) == 2 * 4
    assert all(weight.ndim == 2 for weight in hidden)
    assert not any(weight is other for weight in hidden for other in (model.tokens, model.head.weight))


def test_the_27m_preset_has_27_million_parameters():
    assert count_parameters(DecoderConfig()) == pytest.approx(27e6, rel=0.01)


@pytest.mark.parametrize("mixer", [None, "cayley", "sinkhorn"])
def test_it_compiles(mixer):
    model = make(mixer)
    expected = model(INPUTS, LABELS)
    expected.backward()
    gradients = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    torch.compiler.reset()
    loss = torch.compile(model, backend="aot_eager", dynamic=False)(INPUTS, LABELS)
    loss.backward()
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close([p.grad for p in model.parameters()], gradients)


def test_sizes_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="dim must be a multiple of 2 · heads = 4, not 18"):
        dataclasses.replace(SMALL, dim=18)
