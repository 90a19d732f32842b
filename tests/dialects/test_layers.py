"""Layers of an accelerated model read ahead for the next one, where nothing stands between."""

import copy

import pytest
import torch

import jpmhc
from tests.connections.counting import count_steps
from tests.dialects.models import VOCABULARY, deepseek_v4

LAYERS = 3
TOKENS = torch.randint(VOCABULARY, (1, 9), generator=torch.Generator().manual_seed(0))


@pytest.fixture
def counted(monkeypatch):
    """How many writes were fused with the next read, and how many reads were made by themselves."""
    return count_steps(monkeypatch, "write_read", "read")


def accelerated():
    torch.manual_seed(0)
    return jpmhc.accelerate(deepseek_v4(LAYERS), kernels="reference")


def test_every_write_but_the_last_reads_for_the_next_connection(counted):
    accelerated()(TOKENS)
    # The reference's write_read writes, then reads: every read but the first is one of those.
    assert counted == {"write_read": 2 * LAYERS - 1, "read": 2 * LAYERS}


def test_checkpointed_layers_read_for_themselves(counted):
    model = accelerated()
    model.gradient_checkpointing_enable()
    model.train()
    model(TOKENS).logits.sum().backward()
    assert counted["write_read"] == 2 * LAYERS  # forward and once more, inside of the layers alone


def test_streams_that_changed_on_the_way_are_read_again():
    model = accelerated()
    plain = model(TOKENS).logits
    second = model.model.layers[1]
    second.register_forward_pre_hook(lambda module, args: (args[0] * 1.5, *args[1:]))
    changed = model(TOKENS).logits
    torch.manual_seed(0)
    original = deepseek_v4(LAYERS)
    original.model.layers[1].register_forward_pre_hook(lambda module, args: (args[0] * 1.5, *args[1:]))
    assert not torch.allclose(changed, plain)
    torch.testing.assert_close(changed, original(TOKENS).logits, rtol=1e-4, atol=1e-5)


def test_a_read_without_gradients_is_not_used_where_they_are_wanted():
    model = accelerated()
    first, second = model.model.layers[:2]
    forward = first.forward

    def frozen(*args, **kwargs):
        with torch.no_grad():
            return forward(*args, **kwargs)

    first.forward = frozen
    model(TOKENS).logits.sum().backward()
    assert second.attn_hc.fn.grad is not None
    assert first.attn_hc.fn.grad is None


def test_a_copy_made_after_a_run_has_layers_of_its_own():
    model = accelerated()
    model(TOKENS)
    other = copy.deepcopy(model)
    with torch.no_grad():
        other.model.layers[1].attn_hc.base.add_(1.0)
    assert not torch.allclose(other(TOKENS).logits, model(TOKENS).logits)
