"""Adjacent connections; on the fused kernels: test_fused.py."""

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    apply_activation_checkpointing,
    checkpoint_wrapper,
)

import jpmhc

DIM, N = 8, 4


def test_stack_carries_on_the_first_of_a_tuple():
    stack = jpmhc.HyperConnectionStack(jpmhc.HyperConnection(lambda h: (h, "rest"), DIM, N, index=k) for k in range(3))
    x = torch.randn(2, DIM)
    assert torch.allclose(jpmhc.reduce_streams(stack(jpmhc.expand_streams(x, N))), 8 * x, atol=1e-4)


def test_stack_is_a_sequence():
    blocks = [jpmhc.HyperConnection(nn.Identity(), DIM, N, index=k) for k in range(3)]
    stack = jpmhc.HyperConnectionStack(blocks)
    assert len(stack) == 3
    assert list(stack) == blocks
    assert (stack[0], stack[-1]) == (blocks[0], blocks[2])


@pytest.mark.parametrize("tokens", [1, N, 7])
def test_a_stack_that_expands_and_reduces_maps_hidden_states(tokens):
    """Also where there are as many tokens as streams, which shapes alone cannot tell apart."""
    blocks = [jpmhc.HyperConnection(nn.Linear(DIM, DIM), DIM, N, index=k) for k in range(2)]
    x = torch.randn(2, tokens, DIM)
    expected = jpmhc.reduce_streams(jpmhc.HyperConnectionStack(blocks)(jpmhc.expand_streams(x, N)))
    assert torch.allclose(jpmhc.HyperConnectionStack(blocks, reduce=True, expand=True)(x), expected, atol=1e-6)


@pytest.mark.parametrize("mixer", ["sinkhorn", "cayley"])
def test_stack_compiles_with_variable_sizes(mixer):
    torch.compiler.reset()
    model = jpmhc.HyperConnectionStack(jpmhc.HyperConnection(nn.Linear(DIM, DIM), DIM, N, mixer) for _ in range(2))
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager", dynamic=True)
    for tokens in (5, 3):
        x = torch.randn(tokens, N, DIM, requires_grad=True)
        (found,) = torch.autograd.grad(compiled(x).square().sum(), x)
        (expected,) = torch.autograd.grad(model(x).square().sum(), x)
        assert torch.allclose(found, expected, atol=1e-5)


def test_routed_keywords_compile_without_a_break():
    scaled = jpmhc.HyperConnection(lambda h, scale: h * scale, DIM, N, index=0)
    stack = jpmhc.HyperConnectionStack([scaled, jpmhc.HyperConnection(nn.Linear(DIM, DIM), DIM, N, index=1)])
    x, scale = torch.randn(5, N, DIM), torch.rand(DIM)
    compiled = torch.compile(stack, fullgraph=True, backend="aot_eager")
    assert torch.allclose(compiled(x, scale=scale), stack(x, scale=scale), atol=1e-6)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: jpmhc.HyperConnectionStack([nn.Linear(DIM, DIM)]), "made of HyperConnections, got Linear"),
        (lambda: jpmhc.HyperConnectionStack([], reduce="no"), "reduce must be True or False"),
        (
            lambda: jpmhc.HyperConnectionStack(jpmhc.HyperConnection(nn.Identity(), DIM, n) for n in (2, 4)),
            "same streams and dim, got 2 streams of .* and 4 streams",
        ),
        (
            lambda: jpmhc.HyperConnectionStack([jpmhc.HyperConnection(nn.Identity(), DIM, N)])(None),
            r"expected streams of shape \[..., 4, 8\], got NoneType",
        ),
        (
            lambda: jpmhc.HyperConnectionStack([jpmhc.HyperConnection(nn.Identity(), DIM, N)], expand=True)(
                torch.zeros(2, 5, 32)
            ),
            r"expected a hidden state of shape \[..., 8\], got \[2, 5, 32\]",
        ),
        (lambda: jpmhc.HyperConnectionStack([]), "a stack needs at least one HyperConnection"),
    ],
)
def test_bad_input_is_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize("kernels", ["reference", "fused"])
def test_wrapped_connections_are_called_as_a_whole(kernels):
    """PyTorch's activation checkpointing, around single connections and applied to a whole model."""
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    blocks = [jpmhc.HyperConnection(nn.Linear(16, 16), 16, 4, index=k, kernels=kernels).to(device) for k in range(3)]
    x = torch.randn(5, 4, 16, device=device, requires_grad=True)
    expected = torch.autograd.grad(jpmhc.HyperConnectionStack(blocks)(x).square().sum(), x)
    some = jpmhc.HyperConnectionStack([blocks[0], checkpoint_wrapper(blocks[1]), blocks[2]])
    found = torch.autograd.grad(some(x).square().sum(), x)
    assert torch.allclose(found[0], expected[0], atol=1e-5)
    everywhere = jpmhc.HyperConnectionStack(blocks)
    apply_activation_checkpointing(everywhere, check_fn=lambda module: isinstance(module, jpmhc.HyperConnection))
    found = torch.autograd.grad(everywhere(x).square().sum(), x)
    assert torch.allclose(found[0], expected[0], atol=1e-5)
