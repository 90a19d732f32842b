"""Statistics of the mixers against products known in advance."""

import dataclasses

import pytest
import torch

from jpmhc.experiments.models.decoder import Decoder, DecoderConfig
from jpmhc.experiments.models.recursive import RecursiveModel
from jpmhc.experiments.training.mixing import mixing_statistics
from tests.experiments.training.small_run import SMALL


def statistics(mixer, scale=None):
    torch.manual_seed(0)
    config = dataclasses.replace(SMALL.model, mixer=mixer, streams=2, halt_max_steps=1)
    model = RecursiveModel(config, 6, 16, 1)
    if scale is not None:
        for block in model.core.network.connections:
            size = block.mixer.logits
            block.map.bias.data[-size:] = scale * torch.eye(2).flatten()
    inputs = torch.randint(1, 6, (2, 16))
    return mixing_statistics(model.core, lambda: model.predict(inputs, torch.zeros(2, dtype=torch.int64)))


def test_product_over_a_step_is_the_product_of_all_applications():
    """H = 0.9 I in each of 4 connections × 2 · (1 + 1) calls: every singular value of the product is 0.9¹⁶."""
    found = statistics("unconstrained", 0.9)
    values = found["product_singular_values"]
    assert values["smallest"] == pytest.approx(0.9**16, rel=1e-5)
    assert values["largest"] == pytest.approx(0.9**16, rel=1e-5)
    assert found["product_over_depth"][2] == pytest.approx([0.9**3] * 2, rel=1e-5)
    assert len(found["product_over_depth"]) == len(found["random_product_over_depth"]) == 16
    assert found["skips"]["network.connections.3"] == [[0.9, 0.0], [0.0, 0.9]]
    assert list(found["distance_to_identity"].values()) == pytest.approx([0.1 * 2**0.5] * 4, rel=1e-5)


@pytest.mark.parametrize("delayed", [False, True])
def test_connections_of_a_decoder_are_measured_whether_their_reads_are_delayed_or_not(delayed):
    torch.manual_seed(0)
    sizes = {"dim": 16, "layers": 2, "heads": 2, "length": 8, "vocabulary": 32, "streams": 2}
    model = Decoder(DecoderConfig(**sizes, mixer="unconstrained", mixer_delayed=delayed))
    for block in model.network.connections:
        block.map.bias.data[-4:] = 0.9 * torch.eye(2).flatten()
    tokens = torch.randint(32, (3, 8))
    found = mixing_statistics(model, lambda: model(tokens, tokens))
    assert found["product_singular_values"]["median"] == pytest.approx(0.9**4, rel=1e-5)
    assert list(found["distance_to_identity"].values()) == pytest.approx([0.1 * 2**0.5] * 4, rel=1e-5)


def test_a_fresh_orthogonal_model_keeps_everything_and_a_projector_half():
    found = statistics("cayley")
    assert found["product_collapsed"] == 0.0
    assert found["random_product_over_depth"][-1] == pytest.approx([1.0, 1.0])
    found = statistics("grassmann")
    assert found["product_collapsed"] == 0.5
    assert max(found["violation"].values()) < 1e-6


def test_the_plain_model_has_no_mixers():
    model = RecursiveModel(SMALL.model, 6, 16, 1)
    assert mixing_statistics(model.core, lambda: pytest.fail("nothing to measure")) == {}
