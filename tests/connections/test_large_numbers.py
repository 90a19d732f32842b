"""Legal numbers that are hard for float32: large offsets and sizes, in every form of a connection."""

import pytest
import torch

from jpmhc.connections import eager, reference
from tests.kernels.connection_cases import TOLERANCE, draw, make_case, reference_read, run

FORMS = {
    "reference": reference.compute_logits,
    "eager": lambda x, weight, norm: eager.compute_logits(x, weight, norm)[0],
}


def offset_streams(offset: float, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = (torch.randn(5, 4, 24, generator=generator) + offset).to(dtype)
    return x, torch.randn(9, 96, generator=generator) / 96**0.5


def gradients(function, x, weight, upstream):
    leaves = [t.detach().requires_grad_() for t in (x, weight)]
    return torch.autograd.grad(function(*leaves, "layer"), leaves, upstream)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("offset", [1e2, 1e4])
def test_a_layer_norm_is_not_disturbed_by_an_offset(form, offset):
    x, weight = offset_streams(offset)
    truth = reference.compute_logits(x.double(), weight.double(), "layer")
    forward, backward = TOLERANCE[torch.float32]
    assert (FORMS[form](x, weight, "layer") - truth).norm() < forward * truth.norm()
    upstream = torch.randn(5, 9, generator=torch.Generator().manual_seed(1))
    wanted = gradients(reference.compute_logits, x.double(), weight.double(), upstream.double())
    for found, exact in zip(gradients(FORMS[form], x, weight, upstream), wanted):
        assert (found - exact).norm() < backward * exact.norm()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("norm", ["layer", "rms"])
def test_tokens_whose_squares_overflow_give_nan_for_themselves(form, norm):
    x, weight = offset_streams(0.0)
    x[2] *= 1e19
    x[3] *= 1e17
    found = FORMS[form](x, weight, norm)
    assert found.isnan().all(1).tolist() == [False, False, True, False, False]
    truth = reference.compute_logits(x.double(), weight.double(), norm)
    assert torch.allclose(found[[0, 1, 3, 4]].double(), truth[[0, 1, 3, 4]], rtol=1e-5, atol=1e-6)


def test_a_post_norm_gives_nan_where_squares_overflow():
    x = torch.ones(3, 2, 8)
    x[1, 0] *= 1e19
    assert reference.normalise_streams(x).isnan().any(-1).tolist() == [[False, False], [True, False], [False, False]]


@pytest.mark.parametrize("settings", [{}, {"post_norm": True}])
def test_kernels_lose_no_more_to_an_offset_than_its_digits(settings):
    """The streams' own digits: numbers near the offset are known to 1e-7 of it."""
    case, offset = make_case("cayley", **settings), 1e3
    inputs = draw(case, 3, torch.float32, 1.0, True)
    inputs["x"] = inputs["x"] + offset
    fused, wanted = run(case, inputs, True), run(case, inputs, False)
    for name, value in fused.items():
        allowed = TOLERANCE[torch.float32][name.startswith("grad")] + 1e-6 * offset
        assert (value - wanted[name]).norm() < allowed * wanted[name].norm(), name


@pytest.mark.parametrize("place", [0, 40])
def test_one_large_number_costs_the_kernels_few_digits_wherever_it_stands(place):
    """They centre by the mean of some numbers of a token, which one of these can move far from the mean of all."""
    case = make_case("cayley", d=72)
    inputs = draw(case, 3, torch.float32, 1.0, True)
    inputs["x"][:, 0, place] = 1e4
    fused, wanted = run(case, inputs, True), run(case, inputs, False)
    for name, value in fused.items():
        assert (value - wanted[name]).norm() < 1e-4 * wanted[name].norm(), name


def test_kernels_give_nan_where_squares_overflow():
    case = make_case("cayley", norm="rms")
    inputs = draw(case, 3, torch.float32, 1.0, True)
    inputs["x"][1] *= 1e19
    found = run(case, inputs, True)["h"]
    assert found.isnan().any(1).tolist() == [False, True, False]
    truth, _ = reference_read(inputs["x"].double(), inputs["weight"].double(), inputs["bias"].double(), case)
    assert torch.allclose(found[[0, 2]].double(), truth[[0, 2]], atol=1e-5)
