"""The decoder: what it may look at, where it starts, and how wide it is."""

import math

import pytest
import torch

from jpmhc import MIXERS
from jpmhc.experiments.tasks.language import Decoder, DecoderConfig

SIZE = {"dim": 16, "heads": 2, "layers": 2, "length": 12}


def loss_of(mixer, inputs, labels):
    torch.manual_seed(0)
    connections = {} if mixer is None else {"mixer": mixer, "streams": 4}
    return Decoder(DecoderConfig(**SIZE, **connections))(inputs, labels)


def test_every_mixer_starts_as_the_plain_decoder():
    inputs, labels = torch.randint(256, (2, 3, 12), generator=torch.Generator().manual_seed(0))
    plain = loss_of(None, inputs, labels)
    assert plain.item() == pytest.approx(math.log(256), abs=0.1)
    for mixer in MIXERS:
        assert loss_of(mixer, inputs, labels).item() == pytest.approx(plain.item(), rel=1e-5)


@pytest.mark.parametrize("mixer", [None, "cayley"])
def test_a_byte_is_predicted_from_those_before_it(mixer):
    torch.manual_seed(0)
    model = Decoder(DecoderConfig(**SIZE, **({} if mixer is None else {"mixer": mixer, "streams": 2})))
    inputs = torch.randint(256, (1, 12))
    changed = inputs.clone()
    changed[0, 7] = (changed[0, 7] + 1) % 256
    found = []
    for tokens in (inputs, changed):
        model.head.register_forward_hook(lambda module, given, out: found.append(out))
        model(tokens, tokens)
        model.head._forward_hooks.clear()
    same = torch.isclose(found[0], found[1]).all(-1)[0]
    assert same.tolist() == [True] * 7 + [False] * 5


def test_extra_width_is_spread_over_the_layers():
    config = DecoderConfig(dim=16, heads=2, layers=4, extra_inner=96)
    base = DecoderConfig(dim=16, heads=2, layers=4)
    assert [a - b for a, b in zip(config.inner_widths(), base.inner_widths())] == [32, 32, 16, 16]
    counts = [sum(p.numel() for p in Decoder(c).parameters()) for c in (config, base)]
    assert counts[0] - counts[1] == 3 * 16 * 96
