"""The fused connection against the float64 reference: forward and every gradient."""

import pytest
import torch
from torch import Tensor

from jpmhc.connections import fused
from jpmhc.kernels import make_spec
from jpmhc.kernels.read import why_not
from jpmhc.mixers import Cayley, Circulant, Sinkhorn
from tests.kernels.connection_cases import (
    NAMES,
    TOLERANCE,
    assert_close,
    draw,
    make_case,
    reference_read,
    reference_write,
    run,
)


@pytest.mark.parametrize("name", NAMES)
def test_every_mixer_matches_float64(name: str) -> None:
    case = make_case(name)
    assert_close(case, draw(case, 9, torch.float32, 1.0, True))


@pytest.mark.parametrize("name", ["cayley", "sinkhorn", "grassmann"])
def test_static_logits_match_float64(name: str) -> None:
    case = make_case(name)
    assert_close(case, draw(case, 5, torch.float32, 1.0, False))


@pytest.mark.parametrize(
    "settings",
    [
        {"read": "softmax_matrix", "write": "softmax_matrix", "norm": "rms", "temperature": 0.7},
        {"read": "sigmoid", "write": "sigmoid", "temperature": 2.0},
        {"read": "softmax", "write": "sigmoid", "norm": "rms"},
        {"post_norm": True, "scale": 0.5},
        {"post_norm": True, "norm": "rms", "eps": 0.1},
        {"norm": "rms_outside", "eps": 0.3},
        {"read": "sigmoid", "write": "sigmoid", "read_eps": 0.05, "write_peak": 3.0, "write_eps": 0.02},
    ],
    ids=str,
)
def test_reads_writes_and_norms_match_float64(settings: dict) -> None:
    case = make_case("cayley, sharp", **settings)
    assert_close(case, draw(case, 9, torch.float32, 1.0, True))


@pytest.mark.parametrize(
    ("name", "n", "d", "tokens"),
    [
        ("cayley", 2, 8, 1),
        ("sinkhorn", 2, 72, 17),
        ("cayley", 8, 16, 5),
        ("sinkhorn", 8, 16, 3),
        ("kronecker", 8, 24, 2),
        ("cayley", 4, 520, 3),  # longer than a warp's share of a row
    ],
)
def test_odd_shapes_match_float64(name: str, n: int, d: int, tokens: int) -> None:
    case = make_case(name, n, d)
    assert_close(case, draw(case, tokens, torch.float32, 1.0, True))


@pytest.mark.parametrize("scale", [1.0, 4.0, 10.0])
@pytest.mark.parametrize("name", ["cayley, sharp", "sinkhorn", "sinkhorn of DeepSeek-V4"])
def test_sharp_logits_match_float64(name: str, scale: float) -> None:
    """At scale 10 some logits pass Sinkhorn's clamp: their gradient has to be zero."""
    case = make_case(name)
    assert_close(case, draw(case, 20, torch.float32, scale, True))


@pytest.mark.parametrize("name", ["cayley", "permutation"])
def test_half_precision_matches_float64(name: str) -> None:
    """In float16: the interpreter cannot do bfloat16."""
    case = make_case(name, d=64)
    inputs = draw(case, 17, torch.float16, 1.0, True)
    assert_close(case, inputs)


@pytest.mark.parametrize(
    ("name", "settings", "dynamic"),
    [
        ("cayley", {}, True),
        ("sinkhorn", {"norm": "rms", "post_norm": True, "read": "sigmoid"}, True),
        ("grassmann", {}, False),
    ],
)
def test_equal_streams_held_once(name: str, settings: dict, dynamic: bool) -> None:
    """One stream stands for n equal ones: the same results, and the sum of the n streams' gradients."""
    case = make_case(name, d=72, **settings)
    assert_close(case, draw(case, 9, torch.float32, 1.0, dynamic, held=1))


@pytest.mark.parametrize("held", [1, 4])
@pytest.mark.parametrize("post_norm", [False, True])
def test_mean_of_the_new_streams(post_norm: bool, held: int) -> None:
    case = make_case("cayley", d=72, post_norm=post_norm)
    assert_close(case, draw(case, 9, torch.float32, 1.0, True, held=held), mean=True)


@pytest.mark.gpu
@pytest.mark.parametrize("name", NAMES)
def test_gpu_every_mixer(name: str) -> None:
    case = make_case(name, d=128)
    # The skew matrix of two blocks has the size of eight streams, whose logits may not pass 16 in the kernels.
    for scale in (1.0, 4.0) if name == "orthostochastic, two blocks" else (1.0, 4.0, 10.0):
        assert_close(case, draw(case, 1001, torch.bfloat16, scale, True), scale)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("name", ["cayley", "sinkhorn"])
def test_gpu_every_type(name: str, dtype: torch.dtype) -> None:
    case = make_case(name, d=128, post_norm=True, norm="rms", read="sigmoid", write="softmax_matrix")
    for scale in (1.0, 4.0, 10.0):
        assert_close(case, draw(case, 1001, dtype, scale, True), scale)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("name", "n", "d", "tokens"),
    [
        ("cayley", 2, 512, 1),
        ("sinkhorn", 4, 1000, 65),
        ("cayley", 8, 256, 129),
        ("sinkhorn", 8, 64, 33),
        ("cayley", 4, 2048, 57),
    ],
)
def test_gpu_odd_shapes(name: str, n: int, d: int, tokens: int) -> None:
    case = make_case(name, n, d)
    assert_close(case, draw(case, tokens, torch.bfloat16, 1.0, True))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_gpu_most_logits(dtype: torch.dtype) -> None:
    """Eight streams and matrices of logits: the largest weights the kernels keep on chip."""
    kind = "softmax_matrix" if dtype == torch.bfloat16 else "softmax"
    case = make_case("sinkhorn", 8, 256, read=kind, write=kind)
    inputs = draw(case, 33, dtype, 1.0, True)
    assert_close(case, inputs)
    h, state = fused.read_streams(inputs["x"], inputs["weight"], inputs["bias"], case.spec)
    streams, mine, _ = fused.write_read_streams(h, state, inputs["weight"], inputs["bias"], case.spec)
    wanted, _ = fused.read_streams(streams, inputs["weight"], inputs["bias"], case.spec)
    assert (mine - wanted).double().norm() <= TOLERANCE[dtype][0] * wanted.double().norm()


@pytest.mark.parametrize("mean", [False, True])
def test_other_streams_than_those_read_get_their_own_gradient(mean: bool) -> None:
    case = make_case("cayley")
    inputs = draw(case, 6, torch.float32, 1.0, True)
    other = draw(case, 6, torch.float32, 1.0, True, seed=1)["x"]

    def gradients(by_kernels: bool) -> tuple[Tensor, ...]:
        cast = (lambda t: t.clone()) if by_kernels else (lambda t: t.double())
        x, z, weight, bias = (cast(t).requires_grad_() for t in (inputs["x"], other, inputs["weight"], inputs["bias"]))
        if by_kernels:
            h, state = fused.read_streams(x, weight, bias, case.spec)
            out = fused.write_streams(h, state, z, mean)
        else:
            h, state = reference_read(x, weight, bias, case)
            out = reference_write(z, h, state, case)
            out = out.mean(1) if mean else out
        grad = inputs["grad"][:, 0] if mean else inputs["grad"]
        return torch.autograd.grad(out, (x, z, weight, bias), cast(grad))

    for mine, wanted in zip(gradients(True), gradients(False)):
        assert (mine.double() - wanted).norm() <= 2e-5 * wanted.norm()


def test_what_the_kernels_do_not_cover_is_said() -> None:
    assert "take 2, 4, 8 streams, not 3" in make_spec(Cayley(3).triton_form(), 8)
    assert "multiple of 8" in make_spec(Cayley(4).triton_form(), 12)
    case = make_case("cayley")
    assert why_not(case.spec, torch.float32) is None
    assert "float32, bfloat16 or float16" in why_not(case.spec, torch.float64)
    wide = make_case("sinkhorn", 8, 256, read="softmax_matrix", write="softmax_matrix").spec
    assert why_not(wide, torch.bfloat16) is None
    assert "fits on chip in bfloat16 only" in why_not(wide, torch.float32)


def test_equal_settings_are_one_record_and_others_are_not() -> None:
    """Kernels are compiled for the record, and its key passes through torch.library."""
    one = make_spec(Sinkhorn(4, iterations=3).triton_form(), 8)
    assert make_spec(Sinkhorn(4, iterations=3).triton_form(), 8) is one
    others = [
        make_spec(Sinkhorn(4, iterations=4).triton_form(), 8),
        make_spec(Circulant(4).triton_form(), 8),
        make_spec(Sinkhorn(4, iterations=3).triton_form(), 16),
        make_spec(Sinkhorn(4, iterations=3).triton_form(), 8, temperature=0.5),
    ]
    assert len({one.key, *(other.key for other in others)}) == 5
    assert len({one.cache_key, *(other.cache_key for other in others)}) == 5


@pytest.mark.parametrize("name", [name for name in NAMES if name != "identity"])
def test_nan_reaches_every_coefficient_of_its_own_token_alone(name: str) -> None:
    case = make_case(name)
    inputs = draw(case, 3, torch.float32, 1.0, True)
    inputs["x"][1, 0, 0] = float("nan")
    h, state = fused.read_streams(inputs["x"], inputs["weight"], inputs["bias"], case.spec)
    out = fused.write_streams(torch.zeros_like(h), state)
    assert out.isfinite().flatten(1).all(1).tolist() == [True, False, True]
    assert state.coefficients[1].isnan().all()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_gpu_mean_of_the_new_streams(dtype: torch.dtype) -> None:
    for settings in ({}, {"post_norm": True, "d": 512}, {"d": 2048}):
        case = make_case("sinkhorn", **settings)
        assert_close(case, draw(case, 1001, dtype, 1.0, True), mean=True)


@pytest.mark.parametrize(("n", "size", "tolerance"), [(4, 1e4, 2e-5), (8, 9.0, 1e-4)])
def test_large_cayley_logits_cost_few_digits(n: int, size: float, tolerance: float) -> None:
    """Entries of the skew matrix half as large as the logits, which are the bias alone."""
    case = make_case("cayley, sharp", n)
    inputs = draw(case, 2, torch.float32, size, False)
    computed, wanted = run(case, inputs, True), run(case, inputs, False)
    assert (computed["out"] - wanted["out"]).norm() < tolerance * wanted["out"].norm()


def test_cayley_logits_beyond_the_range_of_eight_streams_give_nan() -> None:
    case = make_case("cayley, sharp", 8)
    assert run(case, draw(case, 2, torch.float32, 1e4, False), True)["out"].isnan().all()


def test_the_size_of_a_frame_does_not_matter() -> None:
    case = make_case("grassmann")
    inputs = draw(case, 2, torch.float32, 1.0, False)
    usual = run(case, inputs, True)
    inputs["bias"] = inputs["bias"].clone()
    inputs["bias"][case.spec.gate_logits :] *= 2.0**70
    huge = run(case, inputs, True)
    assert torch.allclose(huge["out"], usual["out"], atol=1e-6)
    scaled = huge["grad bias"][case.spec.gate_logits :] * 2.0**70
    assert torch.allclose(scaled, usual["grad bias"][case.spec.gate_logits :], atol=1e-5)
