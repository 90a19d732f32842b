"""Products with the Jacobian: against the dense one of torch.func, by forward mode and by differences."""

import pytest
import torch
from torch import nn

from jpmhc.diagnose.jacobian import Jacobian, linearise, push_by_differences, shared_positions


def linearise_at(model, x):
    x = x.clone().requires_grad_()
    y = model(x)
    return linearise(model, x, y, shared_positions(x, y), "from here to there", 0)


@pytest.fixture
def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 5)).double()


@pytest.mark.parametrize("position", [None, 2])
def test_products_are_those_of_the_dense_jacobian(model, position):
    x = torch.randn(4, 6, dtype=torch.float64)
    jacobian = Jacobian(linearise_at(model, x), position)
    dense = torch.func.jacrev(model)(x)  # [4, 5, 4, 6]
    dense = dense.reshape(20, 24) if position is None else dense[position, :, position]
    assert jacobian.shape == dense.shape
    assert jacobian.at.forward == "forward mode"
    u, v = torch.randn(3, len(dense), dtype=torch.float64), torch.randn(3, dense.shape[1], dtype=torch.float64)
    torch.testing.assert_close(jacobian.multiply_transposed(u), u @ dense)
    torch.testing.assert_close(jacobian.multiply(v), v @ dense.T)


class Cubed(torch.autograd.Function):
    """A function with a first derivative and no more: no forward mode, no batching."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        return torch.from_numpy((3 * x.detach() ** 2 * gradient).numpy())


def test_without_forward_mode_central_differences_are_taken():
    x = torch.randn(3, 8) + 2
    at = linearise_at(lambda t: Cubed.apply(t) / 10, x)
    assert at.forward == "central differences"
    assert not at.batched
    v = torch.randn(2, 24)
    torch.testing.assert_close(Jacobian(at).multiply(v), 0.3 * x.flatten() ** 2 * v, rtol=2e-3, atol=2e-3)
    torch.testing.assert_close(Jacobian(at).multiply_transposed(v), 0.3 * x.flatten() ** 2 * v)


def test_central_differences_are_good_to_nine_digits_in_float64(model):
    x, v = torch.randn(4, 6, dtype=torch.float64), torch.randn(4, 6, dtype=torch.float64)
    exact = torch.func.jvp(model, (x,), (v,))[1]
    torch.testing.assert_close(push_by_differences(model, x, v), exact, rtol=1e-8, atol=1e-9)


def test_a_map_that_runs_partly_without_gradients_is_refused():
    def half(x):
        with torch.no_grad():
            rest = torch.sin(3 * x)
        return x + rest

    with pytest.raises(ValueError, match="contradict each other"):
        linearise_at(half, torch.randn(3, 8))


def test_a_map_without_dependence_is_refused():
    with pytest.raises(ValueError, match="does not depend on its input"):
        linearise_at(lambda x: torch.ones(3) + x.detach().sum(), torch.randn(3, 8))
    with pytest.raises(ValueError, match="gives NaN"):
        linearise_at(lambda x: x / 0 - x / 0, torch.randn(3, 8))


@pytest.mark.parametrize(
    ("x", "y", "positions"),
    [((2, 5, 8), (2, 5, 3), (2, 5)), ((7, 8), (7, 3), (7,)), ((8,), (3,), ()), ((2, 3, 4, 4), (2, 9), (2,))],
)
def test_positions_are_the_leading_sizes_that_both_ends_share(x, y, positions):
    assert shared_positions(torch.zeros(x), torch.zeros(y)) == positions


@pytest.mark.parametrize("last", [nn.LayerNorm(12), nn.Softmax(-1)])
def test_outputs_with_a_constant_sum_depend_on_their_input(last):
    """Jᵀ1 is zero for them up to rounding, and exactly zero for some of these seeds."""
    for seed in range(20):
        torch.manual_seed(seed)
        model, x = nn.Sequential(nn.Linear(12, 12), nn.Tanh(), last), torch.randn(1, 12, requires_grad=True)
        linearise(model, x, model(x), (1,), "of the test", 0)
