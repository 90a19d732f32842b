"""Models of `transformers`: outputs, gradients, hidden states, generation, checkpointing, compilation."""

import copy

import pytest
import torch

import jpmhc
from jpmhc.wrap.comparison import default_inputs
from jpmhc.wrap.layers import wrapped_layers
from tests.wrap.models import WITHOUT, difference, disturb, tiny, tokens, wrapped_copy

pytest.importorskip("transformers", reason=WITHOUT)

CLOSE = 1e-5
# The connections of each layer, and how many chains the layers form.
KINDS = {"bert": ([2, 2, 2], 1), "gpt2": ([2, 2, 2], 1), "llama": ([2, 2, 2], 1), "neox": ([1, 1, 1], 1)}
KINDS |= {"t5": ([2, 2, 3, 3], 2), "vit": ([2, 2, 2], 1)}
CAUSAL = ("gpt2", "llama", "neox")


@pytest.mark.parametrize("kind", KINDS)
def test_outputs_and_gradients_are_equal(kind):
    plain = tiny(kind)
    inputs = default_inputs(plain)
    model = wrapped_copy(plain)
    held = wrapped_layers(model).values()
    assert ([len(one.additions) for one in held], sum(one.plan.first for one in held)) == KINDS[kind]
    outputs = [one(**inputs).logits for one in (plain, model)]
    assert difference(*outputs) < CLOSE
    for logits in outputs:
        logits.square().mean().backward()
    gradients = {name: p.grad for name, p in plain.named_parameters() if p.grad is not None}
    largest = max(float(gradient.abs().max()) for gradient in gradients.values())
    for name, gradient in gradients.items():
        assert float((gradient - model.get_parameter(name).grad).abs().max()) < 1e-4 * largest, name


@pytest.mark.parametrize("kind", KINDS)
def test_hidden_states_are_reduced(kind):
    plain = tiny(kind)
    inputs = {**default_inputs(plain), "output_hidden_states": True}
    model = wrapped_copy(plain)
    model(**inputs)
    one, other = plain(**inputs), model(**inputs)
    for key in (key for key in one if key.endswith("hidden_states")):
        assert len(one[key]) == len(other[key])
        assert all(difference(a, b) < CLOSE for a, b in zip(one[key], other[key]))
    for a, b in zip(plain(**inputs, return_dict=False), model(**inputs, return_dict=False)):
        if isinstance(a, tuple) and a and isinstance(a[0], torch.Tensor) and a[0].ndim == 3:
            assert all(difference(x, y) < CLOSE for x, y in zip(a, b))


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_flow_through_hidden_states(kind):
    """The gradient of a hidden state is that of the plain model's, and after training the sum over the streams."""
    plain = tiny(kind)
    inputs = {**default_inputs(plain), "output_hidden_states": True}
    gradients = []
    for model in (plain, wrapped_copy(plain)):
        output = model(**inputs)
        states = [state for key in output if key.endswith("hidden_states") for state in output[key]]
        for state in states:
            state.retain_grad()
        output.logits.square().mean().backward()
        gradients.append([state.grad for state in states])
    for wanted, gradient in zip(*gradients, strict=True):
        assert (gradient is None) == (wanted is None)
        assert wanted is None or difference(wanted, gradient) < 1e-4


def test_single_hidden_states_can_be_asked_for():
    plain = tiny("llama")
    model = wrapped_copy(plain)
    found = [one(tokens(), output_hidden_states=[1]).hidden_states for one in (plain, model)]
    assert difference(*(next(state for state in states if state is not None) for states in found)) < CLOSE


def test_attentions_are_not_taken_for_streams():
    plain = tiny("t5")
    model = wrapped_copy(plain)
    inputs = {"input_ids": tokens(2, 16), "decoder_input_ids": tokens(2, 4), "output_attentions": True}
    one, other = (found(**inputs, output_hidden_states=True) for found in (plain, model))
    for a, b in zip(one.cross_attentions, other.cross_attentions):  # [2, 2, 4, 16], with 4 streams of 16
        assert difference(a, b) < CLOSE


@pytest.mark.parametrize("kind", [*CAUSAL, "t5"])
def test_generation_is_equal_token_by_token(kind):
    plain = tiny(kind)
    model = wrapped_copy(plain)
    for options in ({}, {"num_beams": 3}, {"use_cache": False}, {"cache_implementation": "static"}):
        chosen = [one.generate(tokens(), max_new_tokens=8, do_sample=False, **options) for one in (plain, model)]
        assert torch.equal(*chosen), options


@pytest.mark.parametrize("kind", CAUSAL)
def test_a_cache_gives_what_the_whole_sequence_gives(kind):
    model = disturb(wrapped_copy(tiny(kind)))
    whole = model(tokens()).logits
    seen = model(tokens()[:, :4], use_cache=True)
    parts = [seen.logits]
    for place in range(4, 7):
        seen = model(tokens()[:, place : place + 1], past_key_values=seen.past_key_values, use_cache=True)
        parts.append(seen.logits)
    assert difference(whole, torch.cat(parts, 1)) < CLOSE


def test_a_cache_stays_the_same_object_beside_hidden_states():
    transformers = pytest.importorskip("transformers")
    plain = tiny("llama")
    model, cache = wrapped_copy(plain), transformers.DynamicCache()
    output = model(tokens(), past_key_values=cache, output_hidden_states=True)
    assert output.past_key_values is cache
    options = {"max_new_tokens": 3, "do_sample": False, "output_hidden_states": True, "return_dict_in_generate": True}
    wanted, result = (one.generate(tokens(), **options).hidden_states for one in (plain, model))
    for one, other in zip(wanted, result, strict=True):
        assert all(difference(x, y) < CLOSE for x, y in zip(one, other, strict=True))


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("kind", ["llama", "t5"])
def test_gradient_checkpointing_changes_nothing(kind, reentrant):
    model = disturb(wrapped_copy(tiny(kind))).train()
    inputs = default_inputs(model)
    model.enable_input_require_grads()
    gradients = []
    for checkpointing in (False, True):
        if checkpointing:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
        model.zero_grad()
        model(**inputs, use_cache=False).logits.square().mean().backward()
        gradients.append({name: p.grad.clone() for name, p in model.named_parameters()})
    for name, gradient in gradients[0].items():
        assert difference(gradient, gradients[1][name]) < 1e-4, name


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("recomputed", [(0, 2), (1,), (1, 2)])
def test_some_layers_are_checkpointed_and_others_not(recomputed, reentrant):
    model = disturb(wrapped_copy(tiny("llama"))).train()
    model.enable_input_require_grads()
    calls, gradients = [], []
    for place, layer in enumerate(model.model.layers):
        layer.mlp.register_forward_hook(lambda *_, place=place: calls.append(place))
    for checkpointing in (False, True):
        if checkpointing:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
            for place, layer in enumerate(model.model.layers):
                layer.gradient_checkpointing = place in recomputed
        for _ in range(2):
            calls.clear()
            model.zero_grad()
            model(tokens(), use_cache=False).logits.square().mean().backward()
        gradients.append({name: p.grad.clone() for name, p in model.named_parameters()})
    assert sorted(calls) == sorted([0, 1, 2, *recomputed])
    for name, gradient in gradients[0].items():
        assert difference(gradient, gradients[1][name]) < 1e-4, name


def test_a_checkpointed_model_is_copied_and_unwrapped():
    plain = tiny("llama")
    plain.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model = wrapped_copy(plain).train()
    model(tokens(), use_cache=False).logits.square().mean().backward()
    other = jpmhc.unwrap(copy.deepcopy(model))
    other(tokens(), use_cache=False).logits.square().mean().backward()
    for layer, unwrapped in zip(plain.model.layers, other.model.layers):
        assert unwrapped._gradient_checkpointing_func.func is layer._gradient_checkpointing_func.func
    model.zero_grad()
    model(tokens(), use_cache=False).logits.square().mean().backward()
    assert all(p.grad is not None for p in model.model.layers[0].mlp.parameters())


def test_compiled_as_one_graph():
    model = disturb(wrapped_copy(tiny("llama", num_hidden_layers=2)))
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    assert difference(model(tokens(), use_cache=False).logits, compiled(tokens(), use_cache=False).logits) < CLOSE


@pytest.mark.parametrize("kernels", ["reference", "fused"])
def test_generation_with_a_static_cache_compiles_as_often_as_the_plain_model(kernels):
    plain = tiny("llama", num_hidden_layers=1)
    model = jpmhc.wrap(copy.deepcopy(plain), kernels=kernels)
    chosen, graphs = [], []
    for one in (plain, model):
        torch._dynamo.reset()
        one.forward = torch.compile(one.forward, backend="aot_eager", fullgraph=True)
        before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
        chosen.append(one.generate(tokens(), max_new_tokens=3, do_sample=False, cache_implementation="static"))
        graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"] - before)
    assert torch.equal(*chosen)
    assert graphs[0] == graphs[1] == 2  # the prompt's and one for every new token


def test_autocast():
    plain = tiny("gpt2")
    model = wrapped_copy(plain)
    with torch.autocast("cpu", torch.bfloat16):
        assert difference(*(one(tokens()).logits.float() for one in (plain, model))) < 0.03


def test_half_precision():
    plain = tiny("llama").to(torch.bfloat16)
    model = wrapped_copy(plain)
    assert difference(*(one(tokens()).logits.float() for one in (plain, model))) < 0.05
    assert (
        model.to(torch.float16).get_parameter("model.layers.0.hyper_connections.additions.0.map.bias").dtype
        == torch.float32
    )


def test_probing_leaves_mode_and_generator_alone():
    model = tiny("gpt2").train()
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    jpmhc.wrap(model)
    assert torch.equal(torch.rand(3), expected)
    assert all(module.training for module in model.modules())


def test_a_mask_over_padding_reaches_the_layers():
    plain = tiny("llama")
    model = wrapped_copy(plain)
    mask = torch.ones(2, 7, dtype=torch.long)
    mask[0, :3] = 0
    one, other = (found(tokens(), attention_mask=mask).logits for found in (plain, model))
    assert difference(one[mask.bool()], other[mask.bool()]) < CLOSE
