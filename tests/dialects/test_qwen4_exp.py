"""Qwen3.8-Flash-Next's gated residual against the class of `transformers`."""

import copy
import functools
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import jpmhc
from jpmhc.dialects import qwen4_exp
from tests.dialects import compare, models


@pytest.fixture(scope="module")
def sites() -> nn.Module:
    """Two layers' gated residuals and the head of `transformers`, under the names of its text model."""
    models.require("qwen4_exp")
    from transformers.models.qwen4_exp.modeling_qwen4_exp import Qwen4ExpTextGatedResidual as Gated

    config = SimpleNamespace(hc_count=4, hidden_size=16, hc_lowrank=6, rms_norm_eps=1e-5)
    text = nn.Module()
    text.layers = nn.ModuleList(nn.Module() for _ in range(2))
    for layer in text.layers:
        layer.attn_hyper_connection, layer.mlp_hyper_connection = Gated(config), Gated(config)
    text.hyper_connection_mixer = Gated(config, use_combine=False)
    generator = torch.Generator().manual_seed(0)
    for parameter in text.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator)
    return text


def test_gated_residuals_are_equal_and_so_are_their_gradients(sites):
    loaded = qwen4_exp.load(sites.state_dict(), norm_eps=1e-5)
    x = torch.randn(2, 5, 4, 16, generator=torch.Generator().manual_seed(1)).requires_grad_()
    for place, original in (
        ("layers.0.attn", sites.layers[0].attn_hyper_connection),
        ("layers.1.mlp", sites.layers[1].mlp_hyper_connection),
    ):
        mixed, hyper, weights = original(x.flatten(-2))
        wanted = hyper + (mixed.tanh().unsqueeze(-2) * weights.unsqueeze(-1)).flatten(-2)
        read, state = loaded[place].read(x)
        found = loaded[place].write(x, read.tanh(), state).flatten(-2)
        assert compare.relative(read, mixed) <= compare.RELATIVE
        assert compare.relative(found, wanted) <= compare.RELATIVE
        theirs = torch.autograd.grad(wanted.square().sum(), [x, *original.parameters()])
        ours = torch.autograd.grad(found.square().sum(), [x, *loaded[place].parameters()])
        for one, other in zip(ours, theirs, strict=True):
            assert compare.relative(one, other) <= compare.RELATIVE
    assert compare.relative(loaded["head"](x), sites.hyper_connection_mixer(x.flatten(-2))) <= compare.RELATIVE


def test_state_dicts_return_bit_for_bit(sites):
    state = sites.state_dict()
    again = qwen4_exp.dump(qwen4_exp.load(state), prefix="")
    assert again.keys() == state.keys()
    assert all(torch.equal(again[key], tensor) for key, tensor in state.items())


def test_refusals_name_the_key(sites):
    state = sites.state_dict()
    with pytest.raises(ValueError, match=r"with 2 streams layers\.0\.attn\.inject must have the shape \[2, 64\]"):
        qwen4_exp.load(state, streams=2)
    del state["layers.1.mlp_hyper_connection.hc_norm.weight"]
    with pytest.raises(ValueError, match=r"'layers\.1\.mlp_hyper_connection\.hc_norm\.weight' is missing"):
        qwen4_exp.load(state)


@pytest.mark.interpreter
def test_accelerated_model_is_equal(monkeypatch):
    """As it runs on the CPU, and traced as on a GPU, without the compiler's minutes."""
    torch.manual_seed(0)
    model, tokens = models.qwen4_exp().eval(), models.tokens()
    logits, gradients = compare.logits_and_gradients(model, tokens)
    written = model.generate(tokens, max_new_tokens=4, do_sample=False)
    compiled = functools.cache(lambda function: torch.compile(function, dynamic=True, fullgraph=True, backend="eager"))
    monkeypatch.setattr(qwen4_exp, "_compile", compiled)
    for kernels in ("auto", "fused"):
        fast = jpmhc.accelerate(copy.deepcopy(model), kernels=kernels)
        assert fast.model.layers[0].forward.__func__ is qwen4_exp.Layer.forward
        fast_logits, fast_gradients = compare.logits_and_gradients(fast, tokens)
        assert compare.relative(fast_logits, logits) <= compare.RELATIVE
        assert fast_gradients.keys() == gradients.keys()
        for name, gradient in gradients.items():
            assert (fast_gradients[name] - gradient).norm() <= 1e-5 * max(gradient.norm(), 1e-2), name
        if kernels == "auto":
            assert torch.equal(fast.generate(tokens, max_new_tokens=4, do_sample=False), written)
    assert compiled.cache_info().currsize == 3  # read (of layers and of the head), write and read, write
    assert list(fast.state_dict()) == list(model.state_dict())
