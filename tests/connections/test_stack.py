"""Adjacent connections; on the fused kernels: test_fused.py."""

import pytest
import torch
from torch import nn

import jpmhc

DIM, N = 8, 4


def test_stack_carries_on_the_first_of_a_tuple():
    stack = jpmhc.HyperConnectionStack(jpmhc.HyperConnection(lambda h: (h, "rest"), DIM, N, index=k) for k in range(3))
    x = torch.randn(2, DIM)
    assert torch.allclose(jpmhc.reduce_streams(stack(jpmhc.expand_streams(x, N))), 8 * x, atol=1e-4)


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
    ],
)
def test_bad_input_is_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()
