"""Dense and Lanczos spectra of networks whose singular values are known."""

import numpy as np
import pytest
import torch
from scipy.stats import wasserstein_distance
from torch import nn

import jpmhc
from jpmhc.diagnose.jacobian import Jacobian, linearise
from jpmhc.diagnose.methods import measure_quadrature
from jpmhc.diagnose.spectrum import Spectrum
from tests.diagnose.models import linear_network


def test_dense_spectrum_of_a_linear_network_is_its_svd():
    model, product = linear_network(48, 6)
    found = jpmhc.diagnose(model, torch.randn(1, 48), method="dense", say=None)
    exact = torch.linalg.svdvals(product).flip(0).numpy()
    assert found.whole.method == "dense"
    np.testing.assert_allclose(found.whole.values[0], exact, atol=1e-5)
    np.testing.assert_allclose(found.whole.mean_square(), (exact**2).mean(), rtol=1e-5)


def test_lanczos_spectrum_of_a_linear_network():
    model, product = linear_network(800, 6, seed=1, noise=0.1)
    found = jpmhc.diagnose(
        model, torch.randn(1, 800), method="lanczos", probes=4, steps=64, seconds=0.1, say=None
    ).whole
    exact = torch.linalg.svdvals(product).flip(0).numpy()
    truth = Spectrum(exact[None], np.full((1, 800), 1 / 800), (800, 800), "dense")
    assert wasserstein_distance(exact, found.values.ravel(), None, found.weights.ravel()) < 1e-2
    assert staircase_distance(exact, found) < 0.05
    assert found.largest == pytest.approx(exact[-1], rel=1e-2)
    assert found.smallest == pytest.approx(exact[0], rel=1e-2)
    for read in (Spectrum.mean_square, lambda s: s.quantile(0.5), Spectrum.geometric_mean):
        error = found.error(read)
        assert 0 < error < 0.1
        assert abs(read(found) - read(truth)) < 5 * error + 0.01


@pytest.mark.parametrize("method", ["dense", "lanczos"])
def test_small_singular_values_are_not_squared_away(method):
    """Squares of 1e-10 are below float64's resolution of 1, the singular values themselves are not."""
    values = torch.logspace(-10, 0, 11, dtype=torch.float64)
    q = [torch.linalg.qr(torch.randn(11, 11, dtype=torch.float64))[0] for _ in range(2)]
    model = nn.Linear(11, 11, bias=False, dtype=torch.float64)
    with torch.no_grad():
        model.weight.copy_(q[0] @ (values[:, None] * q[1]))
    inputs = torch.randn(1, 11, dtype=torch.float64)
    found = jpmhc.diagnose(model, inputs, method=method, steps=11, seconds=0.1, say=None).whole
    np.testing.assert_allclose(found.values[0], values.numpy(), rtol=1e-4)


def test_a_wide_and_a_tall_map_begin_on_their_smaller_side():
    torch.manual_seed(0)
    for rows, columns in ((30, 12), (12, 30)):
        model = nn.Linear(columns, rows, bias=False)
        found = jpmhc.diagnose(model, torch.randn(1, columns), method="lanczos", steps=12, seconds=0.1, say=None).whole
        exact = torch.linalg.svdvals(model.weight.detach().double()).flip(0).numpy()
        np.testing.assert_allclose(found.values[0], exact, rtol=1e-3)


def staircase_distance(exact, found):
    """The Kolmogorov–Smirnov distance of exact singular values from the nodes of a quadrature."""
    points = np.unique(np.concatenate([exact, found.values.ravel()]))
    nodes, shares = found.cumulative()
    steps = np.concatenate([[0.0], shares])[np.searchsorted(nodes, points, side="right")]
    return np.abs(steps - np.searchsorted(exact, points, side="right") / len(exact)).max()


def make_spectrum(values, weights, method="lanczos", size=4):
    return Spectrum(np.array(values, float), np.array(weights, float), (size, size), method)


def test_shares_and_quantiles():
    found = make_spectrum([[0.05, 1.0, 20.0], [0.01, 1.0, 2.0]], [[0.5, 0.25, 0.25], [0.3, 0.4, 0.3]], size=3)
    assert found.below() == pytest.approx(0.4)
    assert found.above() == pytest.approx(0.125)
    assert found.mean_square() == pytest.approx((0.5 * 0.0025 + 0.25 + 100 + 0.3e-4 + 0.4 + 1.2) / 2)
    one, two = make_spectrum([[1.0, 2.0]], [[0.5, 0.5]]), make_spectrum([[1.0, 3.0]], [[0.25, 0.75]])
    assert one.quantile(1) == 2.0
    for probability in (-0.1, 1.5, [0.1, 0.5]):
        with pytest.raises(ValueError, match=r"a quantile's probability must lie in \[0, 1\], got"):
            one.quantile(probability)
    np.testing.assert_allclose(np.unique(two.squares(100)), [1, 9])
    assert int((two.squares(100) == 9).sum()) == 75


@pytest.mark.parametrize("probes", [1, 4])
def test_the_error_is_twice_the_scatter_of_random_vectors(probes):
    """Squared entries of s Gaussian unit vectors of N numbers: the mean of f has the variance 2 var(f) / (s N)."""
    values = np.linspace(0.01, 1.0, 100)
    found = make_spectrum([values] * probes, [np.full(100, 0.01)] * probes, size=100)
    factor = 2 * (2 / (probes * 100)) ** 0.5
    assert found.error(Spectrum.mean_square) == pytest.approx(factor * (values**2).std(), rel=0.15)
    assert found.error(lambda s: s.below(0.305)) == pytest.approx(factor * (0.3 * 0.7) ** 0.5, rel=0.15)


def test_few_nodes_leave_open_what_they_cannot_know():
    """Half of the singular values in a narrow peak, twelve steps: the true shares lie inside the bounds everywhere."""
    rng = np.random.default_rng(0)
    exact = np.sort(np.concatenate([rng.uniform(0.3, 2.5, 300), rng.normal(1.0, 0.003, 300)]))
    left, right = (np.linalg.qr(rng.normal(size=(600, 600)))[0] for _ in range(2))
    model = nn.Linear(600, 600, bias=False, dtype=torch.float64)
    with torch.no_grad():
        model.weight.copy_(torch.from_numpy(left * exact @ right))
    inputs = torch.zeros(1, 600, dtype=torch.float64)
    measured = jpmhc.diagnose(model, inputs, method="lanczos", probes=4, steps=12, seconds=0.1, say=None).whole
    points = np.linspace(0.2, 2.7, 400)
    lower, upper = measured.bound_cumulative(points)
    truth = np.searchsorted(exact, points, side="right") / 600
    scatter = 3 * 0.5 / 600**0.5 / 2  # of a share seen by four random vectors of 600 numbers
    assert (truth > lower - scatter).all()
    assert (truth < upper + scatter).all()
    assert (upper - lower).mean() < 0.2
    assert staircase_distance(exact, measured) > 0.1  # the staircase of the nodes alone is far off


def test_a_dense_spectrum_leaves_nothing_open():
    found = Spectrum(np.array([[1.0, 1.0, 2.0, 4.0]]), np.full((1, 4), 0.25), (4, 4), "dense")
    lower, upper = found.bound_cumulative(np.array([0.5, 1.0, 1.5, 4.0, 5.0]))
    assert lower.tolist() == [0, 0, 0.5, 0.75, 1]
    assert upper.tolist() == [0, 0.5, 0.5, 1, 1]


def measure_matrix_by_lanczos(values, steps=64, seed=0):
    """Return the quadrature of a random matrix with these singular values, and its exact spectrum."""
    size, generator = len(values), torch.Generator().manual_seed(seed)
    left, right = (
        torch.linalg.qr(torch.randn(size, size, dtype=torch.float64, generator=generator))[0] for _ in range(2)
    )
    matrix = (left * values) @ right
    x = torch.zeros(size, dtype=torch.float64, requires_grad=True)
    at = linearise(lambda x: matrix @ x, x, matrix @ x, (), "of the matrix", 0)
    exact = Spectrum(values.sort().values.numpy()[None], np.full((1, size), 1 / size), (size, size), "dense")
    return measure_quadrature(Jacobian(at), 4, steps, seed), exact


def test_error_bars_of_a_wide_spectrum_hold_the_truth():
    """Squares over ten decades: 64 nodes see nothing below 0.1, where 11 % are, and the bar has to say so."""
    generator = torch.Generator().manual_seed(0)
    values = (2 * torch.randn(400, dtype=torch.float64, generator=generator)).exp()
    measured, exact = measure_matrix_by_lanczos(values)
    assert float((measured.values < 0.1).mean()) == 0
    quantiles = (lambda s, level=level: s.quantile(level) for level in (0.05, 0.5))
    for read in (Spectrum.below, *quantiles, Spectrum.geometric_mean, Spectrum.mean_square):
        assert abs(read(measured) - read(exact)) <= measured.error(read)
    assert 0.05 < measured.error(Spectrum.below) < 0.3


def test_error_bars_of_collapsed_directions_are_narrow():
    """A tenth at 1e-9, apart from the rest: few nodes know its share as well as four random vectors can."""
    generator = torch.Generator().manual_seed(0)
    values = (0.5 * torch.randn(400, dtype=torch.float64, generator=generator)).exp()
    values[:40] = 1e-9
    measured, _ = measure_matrix_by_lanczos(values)
    assert measured.below() == pytest.approx(0.1, abs=0.03)
    assert measured.error(Spectrum.below) < 0.03


def test_the_geometric_mean_counts_directions_that_few_steps_cannot_reach():
    """24 steps see no singular value below 1e-6, where a tenth of them lie: the mean is four times too high."""
    generator = torch.Generator().manual_seed(0)
    values = (0.5 * torch.randn(400, dtype=torch.float64, generator=generator)).exp()
    values[:40] = 1e-9
    measured, exact = measure_matrix_by_lanczos(values, steps=24)
    miss = abs(measured.geometric_mean() - exact.geometric_mean())
    assert measured.geometric_mean() > 2 * exact.geometric_mean()
    assert miss <= measured.error(Spectrum.geometric_mean)


def test_the_typical_singular_value_is_that_of_those_that_have_not_collapsed():
    values = np.sort(np.concatenate([np.full(75, 1e-5), np.geomspace(1, 4, 25)]))
    spectrum = Spectrum(values[None], np.full((1, 100), 0.01), (100, 100), "dense")
    assert spectrum.typical() == pytest.approx(2, rel=1e-3)
    assert Spectrum(values[None, 75:], np.full((1, 25), 0.04), (25, 25), "dense").typical() == pytest.approx(2)
