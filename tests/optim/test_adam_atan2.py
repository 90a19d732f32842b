"""AdamAtan2 against closed forms, a scalar recursion written apart, and another implementation."""

import copy
import math

import numpy as np
import pytest
import torch

from jpmhc.optim import AdamAtan2

SHAPES = [(5, 7), (3,), (2, 2, 4)]


def parameters(dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator, dtype=dtype).requires_grad_() for shape in SHAPES]


def set_gradients(params, seed):
    generator = torch.Generator().manual_seed(seed)
    for p in params:
        p.grad = torch.randn(p.shape, generator=generator, dtype=p.dtype)


@pytest.mark.parametrize("foreach", [False, True])
def test_first_step_is_the_closed_form(foreach):
    lr, beta1, decay = 0.01, 0.9, 0.1
    (p,) = params = [torch.tensor([2.0, -3.0, 0.5], dtype=torch.float64, requires_grad=True)]
    p.grad = torch.tensor([5.0, -1e-9, 0.0], dtype=torch.float64)
    AdamAtan2(params, lr=lr, betas=(beta1, 0.95), weight_decay=decay, foreach=foreach).step()
    # m = (1 − β₁) g and v = (1 − β₂) g² give atan2((1 − β₁) g, |g|) at the first step: its size does not depend on g.
    size = lr / (1 - beta1) * math.atan(1 - beta1)
    expected = np.array([2.0, -3.0, 0.5]) * (1 - lr * decay) - size * np.array([1.0, -1.0, 0.0])
    np.testing.assert_allclose(p.detach().numpy(), expected, rtol=1e-14)


@pytest.mark.parametrize("foreach", [False, True])
@pytest.mark.parametrize("capturable", [False, True])
def test_many_steps_equal_a_scalar_recursion(foreach, capturable):
    lr, (beta1, beta2), decay = 3e-2, (0.8, 0.95), 0.3
    p = torch.tensor([0.7], dtype=torch.float64, requires_grad=True)
    optimiser = AdamAtan2([p], lr, (beta1, beta2), decay, foreach=foreach, capturable=capturable)
    x, m, v = 0.7, 0.0, 0.0
    for t in range(1, 31):
        gradient = math.sin(3.0 * t) / t
        p.grad = torch.tensor([gradient], dtype=torch.float64)
        optimiser.step()
        m = beta1 * m + (1 - beta1) * gradient
        v = beta2 * v + (1 - beta2) * gradient**2
        x = x * (1 - lr * decay) - lr / (1 - beta1**t) * math.atan2(m, math.sqrt(v) / math.sqrt(1 - beta2**t))
    # The step counter is a float32 tensor where it lives on the device, hence single precision in its powers.
    assert p.item() == pytest.approx(x, rel=1e-6 if capturable else 1e-13)


@pytest.mark.parametrize(("a", "b"), [(1.0, 1.0), (1.27, 0.6)])
@pytest.mark.parametrize("foreach", [False, True])
def test_corrected_form_equals_the_other_implementation(a, b, foreach):
    from adam_atan2_pytorch import AdamAtan2 as OtherAdamAtan2  # here: the file's other tests run without it

    ours, theirs = parameters(), parameters()
    mine = AdamAtan2(ours, 1e-2, (0.9, 0.99), 0.1, form="corrected", a=a, b=b, foreach=foreach)
    other = OtherAdamAtan2(theirs, lr=1e-2, betas=(0.9, 0.99), weight_decay=0.1, a=a, b=b)
    for t in range(20):
        set_gradients(ours, t)
        set_gradients(theirs, t)
        mine.step()
        other.step()
    for p, q in zip(ours, theirs):
        torch.testing.assert_close(p, q, rtol=1e-12, atol=1e-14)


def test_a_parameter_that_joins_late_has_its_own_correction():
    """A parameter without a gradient in the first steps must be corrected by its own count."""
    late, early = torch.zeros(1, dtype=torch.float64, requires_grad=True), torch.ones(2, requires_grad=True)
    optimiser = AdamAtan2([late, early], lr=1e-2, betas=(0.9, 0.95), foreach=True)
    for t in range(4):
        early.grad = torch.ones(2)
        late.grad = torch.ones(1, dtype=torch.float64) if t == 3 else None
        optimiser.step()
    assert late.item() == pytest.approx(-1e-2 * math.atan(0.1) / 0.1, rel=1e-12)


def test_state_survives_saving():
    params = parameters()
    optimiser = AdamAtan2(params, 1e-2, weight_decay=0.1)
    for t in range(3):
        set_gradients(params, t)
        optimiser.step()
    copies = [p.detach().clone().requires_grad_() for p in params]
    resumed = AdamAtan2(copies, 5.0)
    resumed.load_state_dict(copy.deepcopy(optimiser.state_dict()))
    for t in range(3, 6):
        for these, that in ((params, optimiser), (copies, resumed)):
            set_gradients(these, t)
            that.step()
    for p, q in zip(params, copies):
        assert torch.equal(p, q)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"lr": -1.0}, "lr"),
        ({"betas": (0.9, 1.0)}, "betas"),
        ({"weight_decay": -0.1}, "weight_decay"),
        ({"form": "adam"}, "form"),
        ({"a": 1.27}, "corrected"),
    ],
)
def test_bad_arguments_are_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        AdamAtan2(parameters(), **arguments)


@pytest.mark.gpu
def test_a_captured_step_equals_an_eager_one():
    eager = [p.detach().float().cuda().requires_grad_() for p in parameters()]
    captured = [p.detach().clone().requires_grad_() for p in eager]
    one, other = AdamAtan2(eager, 1e-2), AdamAtan2(captured, 1e-2, capturable=True)
    gradients = [torch.randn_like(p) for p in eager]
    for p, q, g in zip(eager, captured, gradients):
        p.grad, q.grad = g.clone(), g.clone()
    start = [p.detach().clone() for p in captured]
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        other.step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        other.step()
    for p, begin in zip(captured, start):
        p.data.copy_(begin)
        for value in other.state[p].values():
            value.zero_()
    for _ in range(5):
        one.step()
        graph.replay()
    for p, q in zip(eager, captured):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)
