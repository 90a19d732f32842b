"""Growth rates at infinite depth against growth rates that are measured by QR, and closed forms."""

import math

import numpy as np
import pytest
import torch

from jpmhc.spectra import growth_edges, layers_until_collapse, projector_rate, share_of_growth_below

# Squared singular values of the shared skip, and the noise of one layer.
SPECTRA = {
    "orthogonal": ([1.0, 1.0, 1.0, 1.0], 0.3),
    "bistochastic": ([1.0, 0.09, 0.04, 0.01], 0.1),
    "near the identity": ([1.0, 0.95, 0.95, 0.95], 0.2),
    "projector": ([1.0, 1.0, 0.0, 0.0], 0.2),
    "spread": ([2.0, 1.0, 0.5, 0.25], 0.6),
}


def measured_growth(squares: list[float], variance: float, width: int, layers: int = 400) -> np.ndarray:
    """Squared growth factors per layer of a random product, by QR."""
    generator = torch.Generator().manual_seed(0)
    size = len(squares) * width
    skip = torch.tensor(squares, dtype=torch.float64).sqrt().repeat_interleave(width)
    frame, logs = torch.eye(size, dtype=torch.float64), torch.zeros(size, dtype=torch.float64)
    for _ in range(layers):
        noise = torch.randn(size, size, dtype=torch.float64, generator=generator) * (variance / size) ** 0.5
        frame, triangle = torch.linalg.qr(skip.unsqueeze(-1) * frame + noise @ frame)
        logs += triangle.diagonal().abs().log()
    return (2 * logs / layers).exp().sort().values.numpy()


@pytest.mark.parametrize("name", SPECTRA)
def test_shares_and_edges_agree_with_measured_growth(name):
    squares, variance = SPECTRA[name]
    found = measured_growth(squares, variance, 30)
    theory = share_of_growth_below(found, squares, variance).numpy()
    rank = (np.arange(len(found)) + 0.5) / len(found)
    assert np.abs(theory - rank).max() < 0.04
    assert abs(growth_edges(squares, variance)[1] / found[-1] - 1) < 0.02


def test_orthogonal_skips_in_closed_form():
    variance = 0.3
    kappa = torch.linspace(1 - variance, 1 + variance, 9, dtype=torch.float64)
    truth = 0.5 + (2 * kappa - (variance**2 + 4 * kappa).sqrt()) / (2 * variance)
    assert (share_of_growth_below(kappa, [1.0, 1.0], variance) - truth).abs().max() < 1e-9
    assert growth_edges([1.0], variance) == pytest.approx((0.7, 1.3))


def test_shares_run_from_zero_to_one_between_the_edges():
    squares, variance = SPECTRA["spread"]
    low, high = growth_edges(squares, variance)
    assert float(share_of_growth_below(high * 1.001, squares, variance)) == pytest.approx(1)
    assert float(share_of_growth_below(high * 0.98, squares, variance)) < 1
    # too much noise for a gap at zero
    assert variance * np.mean(1 / np.array(squares)) > 1
    assert low == 0


def test_projectors_collapse_at_the_rate_of_sampled_ones():
    generator = torch.Generator().manual_seed(0)
    for n, k in ((4, 2), (4, 3)):
        frames = torch.linalg.qr(torch.randn(4000, n, n, dtype=torch.float64, generator=generator))[0][..., :k]
        # the part of one subspace that the next one keeps
        kept = torch.linalg.svdvals(frames[1:].mT @ frames[:-1]).log().mean()
        assert abs(projector_rate(n, k) - float(kept)) < 0.02
    assert projector_rate(3, 3) == 0


def test_one_per_cent_off_the_diagonal_lasts_173_layers():
    skip = torch.full((4, 4), 0.01 / 3, dtype=torch.float64).fill_diagonal_(0.99)
    assert layers_until_collapse(skip.unsqueeze(0)) == pytest.approx(math.log(0.1) / math.log(1 - 0.04 / 3))
    assert round(layers_until_collapse(skip.unsqueeze(0))) in (171, 172, 173)
    assert layers_until_collapse(torch.eye(4, dtype=torch.float64).unsqueeze(0)) == math.inf
    with pytest.raises(ValueError, match="skips must be finite, without NaN or infinity"):
        layers_until_collapse(torch.full((1, 4, 4), math.nan))
    with pytest.raises(ValueError, match=r"expected skips of shape \[\.\.\., n, n\], got \[2, 4, 3\]"):
        layers_until_collapse(torch.ones(2, 4, 3))
