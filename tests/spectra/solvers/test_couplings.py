"""The derivative that Newton's method uses, against differences of the equation itself."""

import pytest
import torch

from jpmhc.spectra import Network
from jpmhc.spectra.solvers.chain_equation import ChainEquation
from jpmhc.spectra.solvers.fixed_point.continuation import AtPoints
from jpmhc.spectra.solvers.fixed_point.contract import Problem

DEPTH, STREAMS = 5, 3


@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("noise", ["isotropic", "read and write", "general"])
def test_corrections_are_those_of_finite_differences(noise, apart):
    generator = torch.Generator().manual_seed(0)

    def normal(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    # Directions that grow at different rates, far below the mean square: the equation is solved in bases of its own.
    sizes = torch.tensor([10.0, 1.0, 0.1] if apart else [1.0, 1.0, 1.0], dtype=torch.float64)
    structure = {}
    if noise == "read and write":
        structure = {"read": normal(DEPTH, STREAMS), "write": normal(DEPTH, STREAMS)}
    elif noise == "general":
        structure = {"covariance": normal(DEPTH, 2, STREAMS, STREAMS)}
    skips = normal(DEPTH, STREAMS, STREAMS) * sizes
    network = Network(skips, torch.linspace(0.1, 1, DEPTH), **structure).rescaled()[0]
    z = torch.tensor([1e-6 + 1e-6j if apart else 0.1 + 0.1j, 0.3 + 0.02j], dtype=torch.complex128)
    equation, index = ChainEquation(network, z), torch.arange(2)
    x = equation.start(z, index)
    for _ in range(3):
        x = equation.between(x, equation.image(x, z, index), 0.5)
    size, correction = equation.newton_correction(x, z, index)
    expected_size, expected = Problem.newton_correction(AtPoints(equation, z, index), x, index)
    assert torch.equal(size, expected_size)
    assert (correction - expected).abs().max() < 3e-6 * expected.abs().max()
