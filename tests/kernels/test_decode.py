"""Few tokens without gradients: one kernel against the float64 reference and against the kernels for many tokens."""

import pytest
import torch

from jpmhc.connections import fused
from jpmhc.kernels import decode
from tests.kernels.connection_cases import NAMES, TOLERANCE, copy_row, draw, make_case, run_row


def assert_seam(name: str, tokens: int, dtype: torch.dtype, held: int = 4, **settings) -> None:
    first, second = make_case("sinkhorn", **settings), make_case(name, **settings)
    one, two = draw(first, tokens, dtype, 1.0, True, held=held), draw(second, tokens, dtype, 1.0, True, seed=1)
    assert decode.are_few(tokens)
    slack = 10 if name.startswith("grassmann") and dtype != torch.float32 else 2
    with torch.no_grad():
        mine, truth = (run_row([first, second], copy_row([one, two], form), form) for form in ("fused", "reference"))
    for found, wanted in zip(mine, truth):
        assert (found.double() - wanted).norm() <= slack * TOLERANCE[dtype][0] * wanted.norm()


@pytest.mark.parametrize("name", NAMES)
def test_every_mixer_matches_float64(name: str) -> None:
    assert_seam(name, 3, torch.float32)


@pytest.mark.parametrize(
    ("held", "settings"),
    [
        (1, {"norm": "rms"}),
        (4, {"d": 520, "read": "softmax_matrix", "write": "sigmoid", "scale": 0.5}),
        (1, {"post_norm": True}),
    ],
)
def test_streams_held_once_and_other_settings(held: int, settings: dict) -> None:
    assert_seam("cayley", 2, torch.float32, held, **settings)


def test_a_static_connection_may_come_before() -> None:
    case = make_case("cayley")
    inputs = draw(case, 5, torch.float32, 1.0, True)
    with torch.no_grad():
        h, state = fused.read_streams(inputs["x"], None, inputs["bias"], case.spec)
        between, found, _ = fused.write_read_streams(h, state, inputs["weight"], inputs["bias"], case.spec)
        wanted, _ = fused.read_streams(between, inputs["weight"], inputs["bias"], case.spec)
    assert torch.allclose(found, wanted, atol=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("name", NAMES)
def test_gpu_every_mixer(name: str) -> None:
    for tokens, d in ((1, 2048), (64, 512), (256, 4096)):
        assert_seam(name, tokens, torch.bfloat16, d=d)
