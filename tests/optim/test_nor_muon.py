"""NorMuon against its formula in float64 and the singular values of its steps."""

import copy

import pytest
import torch

from jpmhc.optim import NorMuon
from jpmhc.optim.nor_muon import orthogonalise


def formula(weight, gradients, lr, beta1, beta2, decay):
    """Steps on one matrix, as the docstring writes them, in float64."""
    weight = weight.double()
    momentum, squares = torch.zeros_like(weight), torch.zeros(len(weight), 1, dtype=torch.float64)
    for gradient in gradients:
        momentum = beta1 * momentum + (1 - beta1) * gradient.double()
        update = (1 - beta1) * gradient.double() + beta1 * momentum
        x = update / update.norm()
        for _ in range(5):
            x = 3.4445 * x - 4.7750 * x @ x.T @ x + 2.0315 * x @ x.T @ x @ x.T @ x
        squares = beta2 * squares + (1 - beta2) * x.square().mean(1, keepdim=True)
        scaled = x / squares.sqrt()
        scaled = scaled * x.norm() / scaled.norm() * max(1, weight.shape[0] / weight.shape[1]) ** 0.5
        weight = (1 - lr * decay) * weight - lr * scaled
    return weight


@pytest.mark.parametrize("shapes", [[(6, 4), (6, 4), (3, 5)], [(4, 4)]])
def test_steps_follow_the_formula(shapes):
    generator = torch.Generator().manual_seed(0)
    weights = [torch.nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes]
    before = [weight.detach().clone() for weight in weights]
    gradients = [[torch.randn(shape, generator=generator) for shape in shapes] for _ in range(4)]
    optimiser = NorMuon(weights, lr=0.03, betas=(0.9, 0.8), weight_decay=0.5)
    for step in gradients:
        for weight, gradient in zip(weights, step):
            weight.grad = gradient
        optimiser.step()
    for k, weight in enumerate(weights):
        truth = formula(before[k], [step[k] for step in gradients], 0.03, 0.9, 0.8, 0.5)
        assert (weight.double() - truth).norm() <= 1e-5 * truth.norm()


def test_weights_of_every_precision_follow_the_formula():
    """Beside each other in one group; the momentum and the weight round to the weight's own precision."""
    errors = {torch.float64: 1e-6, torch.float32: 1e-5, torch.float16: 5e-3, torch.bfloat16: 4e-2}
    generator = torch.Generator().manual_seed(0)
    start, gradients = torch.randn(6, 4, generator=generator), torch.randn(4, 6, 4, generator=generator)
    weights = [torch.nn.Parameter(start.to(dtype, copy=True)) for dtype in errors]
    optimiser = NorMuon(weights, lr=0.3, betas=(0.9, 0.8))
    for gradient in gradients:
        for weight in weights:
            weight.grad = gradient.to(weight.dtype)
        optimiser.step()
    steps = formula(start, gradients, 0.3, 0.9, 0.8, 0.0) - start
    for weight, error in zip(weights, errors.values()):
        assert (weight.double() - start - steps).norm() <= error * steps.norm()


def test_singular_values_come_near_one():
    generator = torch.Generator().manual_seed(0)
    values = torch.linalg.svdvals(orthogonalise(torch.randn(3, 20, 30, generator=generator)))
    assert values.min() > 0.5
    assert values.max() < 1.3


def test_a_saved_state_goes_on_to_the_same_bits():
    torch.manual_seed(0)
    weight = torch.nn.Parameter(torch.randn(5, 3))
    gradients = torch.randn(4, 5, 3)
    optimiser = NorMuon([weight], lr=0.1)
    for k in range(4):
        if k == 2:
            other = torch.nn.Parameter(weight.detach().clone())
            resumed = NorMuon([other], lr=0.1)
            resumed.load_state_dict(copy.deepcopy(optimiser.state_dict()))
        weight.grad = gradients[k]
        optimiser.step()
        if k >= 2:
            other.grad = gradients[k]
            resumed.step()
    assert torch.equal(weight, other)


def test_vectors_are_refused():
    with pytest.raises(ValueError, match=r"NorMuon is for matrices, not for a parameter of shape \(3,\)"):
        NorMuon([torch.nn.Parameter(torch.zeros(3))])
