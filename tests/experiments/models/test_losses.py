"""Losses against the definition of stablemax written out in NumPy."""

import numpy as np
import pytest
import torch

from jpmhc.experiments.models.losses import row_cross_entropy, row_losses, stablemax_cross_entropy


def stablemax(x):
    s = np.where(x >= 0, x + 1, 1 / (1 - np.minimum(x, 0)))
    return s / s.sum(-1, keepdims=True)


def test_cross_entropy_is_minus_log_stablemax():
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(3, 5, 7)) * 10
    labels = rng.integers(0, 7, size=(3, 5))
    expected = -np.log(np.take_along_axis(stablemax(logits), labels[..., None], -1))[..., 0]
    ours = stablemax_cross_entropy(torch.from_numpy(logits), torch.from_numpy(labels))
    np.testing.assert_allclose(ours.numpy(), expected, rtol=1e-13)


def test_huge_logits_stay_finite_with_finite_gradients():
    """Where softmax would underflow, stablemax of ±1e30 has a loss near log(1e60)."""
    logits = torch.tensor([[1e30, -1e30, 0.0]], dtype=torch.float64, requires_grad=True)
    loss = stablemax_cross_entropy(logits, torch.tensor([1]))
    assert loss.item() == pytest.approx(np.log(1e60), rel=1e-6)
    loss.sum().backward()
    assert logits.grad is not None
    assert torch.isfinite(logits.grad).all()


def test_gradient_at_zero_and_elsewhere():
    torch.manual_seed(0)
    logits = torch.randn(4, 6, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: stablemax_cross_entropy(x, torch.tensor([0, 3, 5, 2])), (logits,))
    # s is smooth at 0 with s(0) = s'(0) = 1, so the gradient of −log(s_k / Σ s) there is 1/V − δ.
    zero = torch.zeros(1, 4, dtype=torch.float64, requires_grad=True)
    stablemax_cross_entropy(zero, torch.tensor([2])).sum().backward()
    np.testing.assert_allclose(zero.grad.numpy(), [[0.25, 0.25, -0.75, 0.25]])


def test_rows_average_over_their_own_labels_and_ignore_pad():
    rng = np.random.default_rng(1)
    logits = rng.normal(size=(2, 4, 5))
    labels = np.array([[1, 0, 3, 0], [0, 0, 0, 0]])
    p = stablemax(logits)
    expected = [-(np.log(p[0, 0, 1]) + np.log(p[0, 2, 3])) / 2, 0.0]
    ours = row_cross_entropy(torch.from_numpy(logits), torch.from_numpy(labels))
    np.testing.assert_allclose(ours.numpy(), expected, rtol=1e-13)


def test_exact_needs_every_label_and_halting_is_trained_towards_it():
    labels = torch.tensor([[1, 2, 0], [1, 2, 0]])
    logits = torch.nn.functional.one_hot(
        torch.tensor([[1, 2, 2], [1, 1, 2]]), 3
    ).double()  # PAD positions may say anything
    losses = row_losses(logits, labels, torch.tensor([1.0, 1.0]))
    assert losses.exact.tolist() == [True, False]
    assert losses.correct.tolist() == [1.0, 0.5]
    np.testing.assert_allclose(losses.halting.numpy(), [np.log1p(np.exp(-1)), np.log1p(np.exp(1))], rtol=1e-6)
