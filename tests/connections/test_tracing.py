"""Tools that run a connection without its numbers, or record what it does."""

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

import jpmhc


def make_stack(mixer: str) -> jpmhc.HyperConnectionStack:
    torch.manual_seed(0)
    blocks = [jpmhc.HyperConnection(nn.Linear(8, 8), 8, 4, mixer) for _ in range(2)]
    for block in blocks:
        nn.init.normal_(block.map.weight)
    return jpmhc.HyperConnectionStack(blocks)


@pytest.mark.parametrize("mixer", jpmhc.MIXERS)
def test_fake_tensors_go_forward_and_back(mixer):
    with FakeTensorMode():
        stack = make_stack(mixer)
        x = torch.randn(3, 4, 8, requires_grad=True)
        out = stack(x)
        out.sum().backward()
    assert isinstance(out, FakeTensor)
    assert out.shape == (3, 4, 8)
    assert x.grad.shape == x.shape
    assert all(p.grad.shape == p.shape for p in stack[0].map.parameters())


@pytest.mark.filterwarnings("ignore:.*torch.jit.trace:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:Converting a tensor to a Python:torch.jit.TracerWarning")
@pytest.mark.parametrize("mixer", ["cayley", "sinkhorn", "grassmann"])
def test_a_traced_stack_has_the_outputs_and_gradients_of_its_own(mixer):
    stack = make_stack(mixer)
    traced = torch.jit.trace(stack, (torch.randn(3, 4, 8),))
    if mixer == "sinkhorn":  # what a trace can record
        for block in stack:
            block.mixer.gradient = "unrolled"
    x, parameters = torch.randn(5, 4, 8), list(stack.parameters())
    assert torch.allclose(traced(x), stack(x), atol=1e-5)
    found, wanted = (torch.autograd.grad(f(x).square().sum(), parameters) for f in (traced, stack))
    for one, other in zip(found, wanted):
        assert (one - other).norm() < 1e-4 * other.norm()
