"""DeepSeek-V4 against `transformers`' own model, and its weights as connections and back."""

import copy

import pytest
import torch
from torch import nn

import jpmhc
from jpmhc.dialects import deepseek_v4
from tests.dialects import compare, models


@pytest.fixture(scope="module")
def model() -> nn.Module:
    torch.manual_seed(0)
    return models.deepseek_v4().eval()


def reference_connection(x, fn, base, scale, sublayer):
    """DeepSeek-V4's formulas. x: [T, n, d]"""
    read, write, skip = compare.deepseek_coefficients(x, fn, base, scale)
    y = sublayer(torch.einsum("tn,tnd->td", read, x))
    return torch.einsum("tn,td->tnd", write, y) + skip.mT @ x


@pytest.mark.parametrize("largest", [1.5, 7.3, 22.0])
def test_a_loaded_connection_follows_the_formulas_in_float64(largest):
    generator = torch.Generator().manual_seed(0)
    fn, base, scale, x = (
        torch.randn(shape, generator=generator, dtype=torch.float64) for shape in ((24, 64), (24,), (3,), (50, 4, 16))
    )
    base *= largest / base.abs().max()
    state = {
        f"layers.0.hc_attn_{part}": tensor for part, tensor in (("fn", 0.1 * fn), ("base", base), ("scale", scale))
    }
    connection = deepseek_v4.load(state)["layers.0.attn"]
    connection.sublayer = torch.tanh
    source = connection.map.source
    leaves = [x.requires_grad_(), source.fn, source.base, source.scale]
    found, wanted = connection(x), reference_connection(*leaves, torch.tanh)
    assert (found - wanted).abs().max() <= 1e-12 * wanted.abs().max()
    direction = torch.randn(x.shape, generator=generator, dtype=torch.float64)
    for one, other in zip(
        torch.autograd.grad((found * direction).sum(), leaves), torch.autograd.grad((wanted * direction).sum(), leaves)
    ):
        assert (one - other).abs().max() <= 1e-12 * other.abs().max()


@pytest.mark.interpreter
def test_fused_kernels_are_equal(model):
    models.sharpen(model, 22.0)
    fast = jpmhc.accelerate(copy.deepcopy(model), kernels="fused")
    logits, gradients = compare.logits_and_gradients(model, models.tokens(1, 5))
    fast_logits, fast_gradients = compare.logits_and_gradients(fast, models.tokens(1, 5))
    assert compare.relative(fast_logits, logits) <= compare.RELATIVE
    compare.assert_gradients_are_equal(fast_gradients, gradients)


def test_hidden_states_and_checkpointing_are_equal(model):
    models.sharpen(model, 1.5)
    fast = jpmhc.accelerate(copy.deepcopy(model))
    wanted = model(models.tokens(), output_hidden_states=True).hidden_states
    found = fast(models.tokens(), output_hidden_states=True).hidden_states
    assert len(found) == len(wanted)
    assert all(compare.relative(a, b) <= compare.RELATIVE for a, b in zip(found, wanted))
    _, gradients = compare.logits_and_gradients(fast, models.tokens())
    fast.gradient_checkpointing_enable()
    fast.train()
    _, again = compare.logits_and_gradients(fast, models.tokens())
    assert compare.relative(again["model.layers.0.attn_hc.fn"], gradients["model.layers.0.attn_hc.fn"]) <= 1e-6


def test_a_copy_of_an_accelerated_model_has_parameters_of_its_own(model):
    fast = jpmhc.accelerate(copy.deepcopy(model))
    again = copy.deepcopy(fast)
    before = fast(models.tokens()).logits
    with torch.no_grad():
        for parameter in fast.parameters():
            parameter.zero_()
    assert torch.equal(again(models.tokens()).logits, before)


def state(**changes):
    whole = {
        f"layers.{layer}.hc_{site}_{part}": torch.zeros(shape)
        for layer in range(2)
        for site in ("attn", "ffn")
        for part, shape in (("fn", (24, 64)), ("base", (24,)), ("scale", (3,)))
    }
    return {key: tensor for key, tensor in (whole | changes).items() if tensor is not None}


@pytest.mark.parametrize(
    ("changes", "settings", "message"),
    [
        ({"layers.1.hc_ffn_base": None}, {}, r"'layers\.1\.hc_ffn_base' is missing"),
        (
            {f"layers.0.hc_ffn_{part}": None for part in ("fn", "base", "scale")},
            {},
            r"layers\.0\.hc_ffn_fn' is missing",
        ),
        ({"layers.0.hc_attn_gain": torch.ones(3)}, {}, r"'layers\.0\.hc_attn_gain' is not one of DeepSeek-V4's"),
        ({"model.layers.0.attn_hc.fn": torch.ones(24, 64)}, {}, "not named like the keys before it"),
        ({"layers.1.hc_attn_scale": torch.ones(2)}, {}, r"layers\.1\.attn\.scale must have the shape \[3\], got \[2\]"),
        ({}, {"streams": 8}, r"with 8 streams layers\.0\.attn\.fn must have the shape \[80, 64\], got \[24, 64\]"),
        ({}, {"iterations": 0}, "iterations must be"),
        ({"layers.0.hc_mix_fn": torch.ones(24, 64)}, {}, r"'layers\.0\.hc_mix_fn' is not one of DeepSeek-V4's"),
        ({"layers.0.hc_attn_base": [0.0] * 24}, {}, r"hc_attn_base' in the state dict must be a tensor .*, got list"),
        ({"layers.0.hc_attn_base": torch.zeros(24).int()}, {}, r"of floating-point numbers, got torch\.int32"),
        (
            {"layers.1.hc_attn_fn": torch.zeros(24, 32)},
            {},
            r"layers\.1\.attn\.fn is for streams of width 8, layers\.0\.attn\.fn for 16",
        ),
    ],
)
def test_refusals_name_the_key(changes, settings, message):
    deepseek_v4.load(state())
    with pytest.raises(ValueError, match=message):
        deepseek_v4.load(state(**changes), **settings)


def test_state_dict_of_another_model_is_refused():
    with pytest.raises(ValueError, match=r"no keys of DeepSeek-V4, such as 'model\.layers\.0\.attn_hc\.fn'"):
        deepseek_v4.load(nn.Linear(2, 2).state_dict())
    with pytest.raises(ValueError, match=r"must hold tensors by name, as model\.state_dict\(\), got Linear"):
        deepseek_v4.load(nn.Linear(2, 2))


def test_accelerate_refuses_other_models_and_a_second_time(model):
    with pytest.raises(ValueError, match=r"the model must be a torch\.nn\.Module, got NoneType"):
        jpmhc.accelerate(None)
    with pytest.raises(ValueError, match="Linear has no layers of a known dialect; the known ones are DeepseekV4"):
        jpmhc.accelerate(nn.Linear(2, 2))
    fast = jpmhc.accelerate(copy.deepcopy(model))
    with pytest.raises(ValueError, match=r"model\.layers\.0 is accelerated already"):
        jpmhc.accelerate(fast)


def test_accelerate_refuses_weights_of_other_streams(model):
    other = copy.deepcopy(model)
    other.model.layers[1].ffn_hc.hc_mult = 2
    with pytest.raises(ValueError, match=r"with 2 streams model\.layers\.1\.ffn_hc\.fn must have the shape \[8, 128\]"):
        jpmhc.accelerate(other)


def test_what_dump_cannot_name_is_refused():
    dump = jpmhc.dialects.deepseek_v4.dump
    block = jpmhc.HyperConnection(None, 8)
    with pytest.raises(ValueError, match="connections must be the dict by site that load returned, got list"):
        dump([1])
    with pytest.raises(ValueError, match=r"must be a connection or a head that load returned, got HyperConnection"):
        dump({"layers.0.attn": block})
    with pytest.raises(
        ValueError, match=r"'zzz' is not a connection's site in this set of names; sites are such as layers\.0\.attn"
    ):
        jpmhc.dialects.qwen4_exp.dump({"zzz": block})
    with pytest.raises(ValueError, match=r"has a tensor 'map\.bias', for which these names have no key"):
        jpmhc.dialects.qwen4_exp.dump({"layers.0.attn": block})
