"""GMRES against direct solutions."""

import torch

from jpmhc.spectra.solvers.fixed_point.gmres import gmres


def test_equations_with_few_large_directions_are_solved_in_few_products():
    generator = torch.Generator().manual_seed(0)

    def normal(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.complex128)

    columns, rows, right = normal(4, 60, 3), normal(4, 3, 60) / 60, normal(4, 60)
    matrix = columns @ rows + 0.01 * normal(4, 60, 60) / 60**0.5
    scale = torch.logspace(-6, 6, 60, dtype=torch.float64)
    matrix, right = matrix * scale.unsqueeze(-1) / scale, right * scale
    counted = []

    def product(change):
        counted.append(1)
        return (matrix @ change.unsqueeze(-1)).squeeze(-1)

    found = gmres(product, right, 1 / scale.expand(4, -1), steps=20, tolerance=1e-10)
    truth = torch.linalg.solve(torch.eye(60, dtype=torch.complex128) - matrix, right)
    assert ((found - truth).abs() / scale).max() < 1e-8
    assert len(counted) <= 12
