"""Laws of DeepSeek-V4 and its followers, GLM-5.3-Flash and HY-V4, against `transformers`' own models."""

import copy

import pytest
import torch

import jpmhc
from jpmhc.dialects import DIALECTS
from tests.dialects import compare, models

SETTINGS = {"deepseek_v4": {}, "glm5_next": {}, "hy_v4": {"magnitude": 3.0}}


@pytest.fixture(scope="module", params=SETTINGS)
def case(request):
    torch.manual_seed(0)
    return request.param, getattr(models, request.param)().eval()


@pytest.mark.parametrize("largest", [1.5, 22.0])
def test_accelerated_model_is_equal(case, largest):
    compare.assert_accelerated_is_equal(models.sharpen(case[1], largest), models.tokens())


def test_generation_is_equal(case):
    model = models.sharpen(case[1], 7.3)
    fast = jpmhc.accelerate(copy.deepcopy(model))
    wanted = model.generate(models.tokens(), max_new_tokens=6, do_sample=False)
    assert torch.equal(fast.generate(models.tokens(), max_new_tokens=6, do_sample=False), wanted)


@pytest.mark.parametrize("names", ["huggingface", "original"])
def test_state_dicts_return_bit_for_bit(case, names):
    name, model = case
    dialect, state = DIALECTS[name], models.sharpen(model, 7.3).state_dict()
    written = dialect.dump(dialect.load(state, **SETTINGS[name]), names)
    again = dialect.dump(dialect.load(written, **SETTINGS[name]))
    assert set(again) == {key for key in state if "_hc." in key or "hc_head" in key}
    assert all(torch.equal(tensor, state[key]) for key, tensor in again.items())


def test_loaded_connections_compute_what_the_model_does(case):
    name, model = case
    models.sharpen(model, 22.0)
    connections = DIALECTS[name].load(model.state_dict(), **SETTINGS[name])
    x = torch.randn(2, 5, 4, 32, generator=torch.Generator().manual_seed(0))
    body = model.model.language_model if name == "glm5_next" else model.model
    post, *comb, collapsed = body.layers[1].ffn_hc(x)
    read, state = connections["layers.1.ffn"].read(x)
    assert compare.relative(read, collapsed) <= compare.RELATIVE
    wanted = post.unsqueeze(-1) * collapsed.unsqueeze(-2) + (comb[0].mT @ x if comb else x)
    assert compare.relative(connections["layers.1.ffn"].write(x, collapsed, state), wanted) <= compare.RELATIVE
    assert compare.relative(connections["head"](x), body.hc_head(x)) <= compare.RELATIVE


def test_a_missing_key_is_named(case):
    name, model = case
    state = model.state_dict()
    key = next(key for key in state if key.endswith("layers.1.attn_hc.base"))
    del state[key]
    with pytest.raises(ValueError, match=f"the key '{key}' is missing"):
        DIALECTS[name].load(state)
