"""The formulas of published models, and how a model and its accelerated copy are compared."""

import copy

import torch
from torch import Tensor, nn

import jpmhc

RELATIVE = 1e-5


def relative(found: Tensor, wanted: Tensor) -> float:
    return float((found - wanted).detach().norm() / wanted.detach().norm())


def logits_and_gradients(model: nn.Module, tokens: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    model.zero_grad(set_to_none=True)
    logits = model(tokens).logits
    direction = torch.randn(logits.shape, generator=torch.Generator().manual_seed(3))
    (logits * direction).sum().backward()
    return logits.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def assert_gradients_are_equal(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    """Equal up to rounding; a gradient that cancels to nothing is compared with the typical size of one."""
    assert found.keys() == wanted.keys()
    typical = sum(float(g.norm()) for g in wanted.values()) / len(wanted)
    for name, gradient in wanted.items():
        error = float((found[name] - gradient).norm())
        assert error <= RELATIVE * max(float(gradient.norm()), 0.1 * typical), name


def assert_accelerated_is_equal(model: nn.Module, tokens: Tensor) -> nn.Module:
    """The accelerated copy has the same logits, gradients, tokens and names; the model itself stays as it was."""
    fast = jpmhc.accelerate(copy.deepcopy(model))
    logits, gradients = logits_and_gradients(model, tokens)
    fast_logits, fast_gradients = logits_and_gradients(fast, tokens)
    assert relative(fast_logits, logits) <= RELATIVE
    assert not torch.equal(fast_logits, logits), "the copy does not run on other code"
    assert_gradients_are_equal(fast_gradients, gradients)
    state, fast_state = model.state_dict(), fast.state_dict()
    assert list(state) == list(fast_state)
    assert all(torch.equal(fast_state[key], tensor) for key, tensor in state.items())
    return fast


def sinkhorn(logits: Tensor, iterations: int, eps: float) -> Tensor:
    """A softmax by rows, then columns, rows, columns, …, each divided by its sum and eps. [T, n, n]"""
    c = logits.softmax(2) + eps
    c = c / (c.sum(1, keepdim=True) + eps)
    for _ in range(iterations - 1):
        c = c / (c.sum(2, keepdim=True) + eps)
        c = c / (c.sum(1, keepdim=True) + eps)
    return c


def deepseek_coefficients(x: Tensor, fn: Tensor, base: Tensor, scale: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """DeepSeek-V4's read weights, write weights and Sinkhorn matrices of the streams x [T, n, d]."""
    n, flat = x.shape[1], x.flatten(1)
    m = (flat @ fn.T) / (flat.square().mean(-1, keepdim=True) + 1e-6).sqrt()
    read, write, skip = (
        part * factor + offset
        for part, factor, offset in zip(m.split((n, n, n * n), 1), scale, base.split((n, n, n * n)))
    )
    return read.sigmoid() + 1e-6, 2 * write.sigmoid(), sinkhorn(skip.unflatten(1, (n, n)), 20, 1e-6)
