"""Frames and projectors, against QR and the definitions."""

import pytest
import torch

from jpmhc.manifolds import grassmann, orthogonal


@pytest.mark.parametrize(("n", "p"), [(1, 1), (4, 2), (5, 5), (8, 3)])
def test_orthonormalize_is_qr_with_positive_diagonal(n, p):
    frame = torch.randn(7, n, p, dtype=torch.float64)
    q, r = torch.linalg.qr(frame)
    expected = q * r.diagonal(dim1=-2, dim2=-1).sign().unsqueeze(-2)  # eq. qr-retraction
    assert torch.allclose(grassmann.orthonormalize(frame), expected, atol=1e-12)


def test_orthonormalize_survives_nearly_dependent_columns():
    frame = torch.randn(6, 1).repeat(1, 3) + 1e-4 * torch.randn(6, 3, generator=torch.Generator().manual_seed(0))
    assert orthogonal.violation(grassmann.orthonormalize(frame)) < 1e-5


def test_dependent_columns_give_nan_for_their_frame_alone():
    frame = torch.randn(8, 6, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    frame[1:, :, 2] = 2 * frame[1:, :, 0] - frame[1:, :, 1]
    frame[7] = 0.0
    projectors = grassmann.project(frame)
    assert grassmann.violation(projectors[0]) < 1e-12
    assert projectors[1:].isnan().all()


def test_project_is_the_projector_onto_the_span():
    frame = torch.randn(5, 6, 2, dtype=torch.float64)
    expected = frame @ torch.linalg.pinv(frame)
    assert torch.allclose(grassmann.project(frame), expected, atol=1e-12)


def test_horizontal_part_is_orthogonal_to_the_span():
    frame = grassmann.sample_frame(6, 3, (4,))
    gradient = torch.randn_like(frame)
    horizontal = grassmann.horizontal(frame, gradient)
    assert (frame.mT @ horizontal).abs().max() < 1e-13
    assert torch.allclose(grassmann.horizontal(frame, horizontal), horizontal)


def test_retraction_follows_the_direction_to_first_order_and_stays_orthonormal():
    frame = grassmann.sample_frame(6, 2, generator=torch.Generator().manual_seed(0))
    direction = grassmann.horizontal(frame, torch.randn(6, 2, dtype=torch.float64))
    moved = grassmann.retract(frame, direction, 1e-6, None)
    assert torch.allclose((moved - frame) / 1e-6, direction, atol=1e-5)
    assert orthogonal.violation(grassmann.retract(frame, direction, 0.5, None)) < 1e-14
    exact = grassmann.retract(frame, direction, 0.05, None)
    errors = [(grassmann.retract(frame, direction, 0.05, s) - exact).norm() for s in (1, 2, 4)]
    assert errors[0] > 5 * errors[1] > 25 * errors[2] > 0


def test_violation_sees_what_is_no_projector():
    projector = grassmann.sample(5, 2, (3,))
    assert grassmann.violation(projector).max() < 1e-14
    assert torch.allclose(projector.diagonal(dim1=-2, dim2=-1).sum(-1), torch.tensor(2.0, dtype=torch.float64))
    assert grassmann.violation(0.5 * torch.eye(3)) == 0.25
    assert grassmann.violation(torch.tensor([[1.0, 1.0], [0.0, 0.0]])) == 1.0  # idempotent, not symmetric


def test_default_rank_is_half():
    assert [grassmann.default_rank(n) for n in (1, 2, 4, 5, 8)] == [1, 1, 2, 2, 4]


def test_bad_input_is_named():
    with pytest.raises(ValueError, match="1 <= p <= n"):
        grassmann.projector(torch.zeros(2, 3))
    with pytest.raises(ValueError, match="rank must be between 1 and n = 4"):
        grassmann.sample(4, 5)
    with pytest.raises(ValueError, match="shape"):
        grassmann.horizontal(torch.eye(3), torch.eye(2))


@pytest.mark.parametrize("size", [1e30, 1e-30])
def test_the_size_of_a_frame_does_not_matter(size):
    frame = torch.randn(20, 5, 2, generator=torch.Generator().manual_seed(0))
    assert torch.allclose(grassmann.project(frame * size), grassmann.project(frame), atol=2e-6)
    columns = torch.tensor([size, 1.0])
    assert torch.allclose(grassmann.project(frame * columns), grassmann.project(frame), atol=2e-6)
