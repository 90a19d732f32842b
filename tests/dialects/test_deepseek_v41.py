"""DeepSeek-V4.1's delayed read against its formulas in float64, which no released `transformers` has."""

import pytest
import torch

from jpmhc import HyperConnection, HyperConnectionStack
from jpmhc.dialects import deepseek_v41
from jpmhc.dialects.mhc import PARTS
from tests.dialects import compare

SHAPES = {"fn": (24, 32), "base": (24,), "scale": (3,)}


def draw_state(layers: int, largest: float) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    state = {}
    for layer in range(layers):
        for site in ("attn", "ffn"):
            for part in PARTS:
                drawn = torch.randn(SHAPES[part], generator=generator, dtype=torch.float64)
                factor = largest / drawn.abs().max() if part == "base" else 0.2 if part == "fn" else 1.0
                state[f"layers.{layer}.hc_{site}_{part}"] = drawn * factor
    return state


def run_formulas(state, x, layers, sublayer):
    pre_mix = torch.tensor([1.0, 0.0, 0.0, 0.0], dtype=x.dtype).expand(len(x), 4)
    for layer in range(layers):
        for site in ("attn", "ffn"):
            tensors = (state[f"layers.{layer}.hc_{site}_{part}"] for part in PARTS)
            read, write, skip = compare.deepseek_coefficients(x, *tensors)
            y = sublayer((pre_mix.unsqueeze(-1) * x).sum(1))
            x = write.unsqueeze(-1) * y.unsqueeze(1) + skip.mT @ x
            pre_mix = read
    return x, (pre_mix.unsqueeze(-1) * x).sum(1)


@pytest.mark.parametrize("largest", [1.5, 22.0])
def test_a_delayed_stack_follows_the_formulas(largest):
    state = {key: tensor.requires_grad_() for key, tensor in draw_state(2, largest).items()}
    connections = deepseek_v41.load(state)
    for connection in connections.values():
        connection.sublayer = torch.tanh
    x = torch.randn(7, 4, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).requires_grad_()
    streams, reduced = run_formulas(state, x, 2, torch.tanh)
    found = HyperConnectionStack(connections.values(), reduce=True, delayed=True)(x.view(1, 7, 4, 8))
    torch.testing.assert_close(found[0], reduced, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(
        HyperConnectionStack(connections.values(), delayed=True)(x), streams, rtol=1e-12, atol=1e-12
    )
    keys = list(state)
    wanted = torch.autograd.grad(reduced.square().sum(), [x, *(state[key] for key in keys)], allow_unused=True)
    mine = [getattr(connections[f"layers.{k[7]}.{k[12:].split('_')[0]}"].map.source, k.split("_")[-1]) for k in keys]
    gradients = torch.autograd.grad(found.square().sum(), [x, *mine], allow_unused=True)
    for one, other in zip(gradients, wanted):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("names", ["huggingface", "original"])
def test_state_dicts_return_bit_for_bit(names):
    state = draw_state(3, 7.3)
    written = deepseek_v41.dump(deepseek_v41.load(state), names)
    again = deepseek_v41.dump(deepseek_v41.load(written), "original")
    assert again.keys() == state.keys()
    assert all(torch.equal(again[key], tensor) for key, tensor in state.items())


def test_a_missing_key_is_named_and_a_head_is_refused():
    state = draw_state(2, 1.5)
    with pytest.raises(ValueError, match="'hc_head_fn' is not one of DeepSeek-V4"):
        deepseek_v41.load(state | {"hc_head_fn": torch.zeros(4, 32)})
    del state["layers.1.hc_attn_base"]
    with pytest.raises(ValueError, match=r"'layers\.1\.hc_attn_base' is missing"):
        deepseek_v41.load(state)


def test_a_delayed_stack_starts_as_the_plain_residual():
    torch.manual_seed(0)
    sublayers = [torch.nn.Linear(8, 8) for _ in range(3)]
    stack = HyperConnectionStack([HyperConnection(f, 8, index=0) for f in sublayers], reduce=True, delayed=True)
    x = torch.randn(5, 8)
    plain = x
    for f in sublayers:
        plain = plain + f(plain)
    torch.testing.assert_close(stack(x.unsqueeze(-2)), plain)
