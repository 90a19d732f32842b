"""The fused connection against the float64 reference: forward and every gradient."""

import pytest
import torch
from torch import Tensor

from jpmhc import kernels
from tests.kernels import reference
from tests.kernels.connection_cases import MIXERS, TOLERANCE, assert_close, draw, spec_of


@pytest.mark.parametrize("name", MIXERS)
def test_every_mixer_matches_float64(name: str) -> None:
    spec = spec_of(name)
    assert_close(spec, draw(spec, 9, torch.float32, 1.0, True))


@pytest.mark.parametrize("name", ["cayley", "sinkhorn", "grassmann-2"])
def test_static_logits_match_float64(name: str) -> None:
    spec = spec_of(name)
    assert_close(spec, draw(spec, 5, torch.float32, 1.0, False))


@pytest.mark.parametrize(
    "settings",
    [
        {"read": "softmax_matrix", "write": "softmax_matrix", "norm": "rms", "temperature": 0.7},
        {"read": "sigmoid", "write": "sigmoid", "temperature": 2.0},
        {"read": "softmax", "write": "sigmoid", "norm": "rms"},
        {"post_norm": True},
    ],
    ids=str,
)
def test_reads_writes_and_norms_match_float64(settings: dict) -> None:
    spec = spec_of("cayley", scale=1.0, **settings)
    assert_close(spec, draw(spec, 9, torch.float32, 1.0, True))


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
    spec = spec_of(name, n, d, scale=0.5)
    assert_close(spec, draw(spec, tokens, torch.float32, 1.0, True))


@pytest.mark.parametrize("scale", [1.0, 4.0, 10.0])
@pytest.mark.parametrize("name", ["cayley", "sinkhorn"])
def test_sharp_logits_match_float64(name: str, scale: float) -> None:
    """At scale 10 some logits pass Sinkhorn's clamp: their gradient has to be zero."""
    spec = spec_of(name, scale=1.0) if name == "cayley" else spec_of(name)
    assert_close(spec, draw(spec, 20, torch.float32, scale, True))


@pytest.mark.parametrize("name", ["cayley", "permutation"])
def test_half_precision_matches_float64(name: str) -> None:
    """In float16: the interpreter cannot do bfloat16."""
    spec = spec_of(name, d=64)
    inputs = draw(spec, 17, torch.float16, 1.0, True)
    assert_close(spec, inputs)


@pytest.mark.parametrize(
    ("name", "settings", "dynamic"),
    [
        ("cayley", {}, True),
        ("sinkhorn", {"norm": "rms", "post_norm": True, "read": "sigmoid"}, True),
        ("grassmann-2", {}, False),
    ],
)
def test_equal_streams_held_once(name: str, settings: dict, dynamic: bool) -> None:
    """One stream stands for n equal ones: the same results, and the sum of the n streams' gradients."""
    spec = spec_of(name, d=72, **settings)
    assert_close(spec, draw(spec, 9, torch.float32, 1.0, dynamic, held=1))


@pytest.mark.parametrize("held", [1, 4])
@pytest.mark.parametrize("post_norm", [False, True])
def test_mean_of_the_new_streams(post_norm: bool, held: int) -> None:
    spec = spec_of("cayley", d=72, post_norm=post_norm)
    assert_close(spec, draw(spec, 9, torch.float32, 1.0, True, held=held), mean=True)


@pytest.mark.gpu
@pytest.mark.parametrize("name", MIXERS)
def test_gpu_every_mixer(name: str) -> None:
    spec = spec_of(name, d=128)
    for scale in (1.0, 4.0, 10.0):
        assert_close(spec, draw(spec, 1001, torch.bfloat16, scale, True), scale)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("name", ["cayley", "sinkhorn"])
def test_gpu_every_type(name: str, dtype: torch.dtype) -> None:
    spec = spec_of(name, d=128, post_norm=True, norm="rms", read="sigmoid", write="softmax_matrix")
    for scale in (1.0, 4.0, 10.0):
        assert_close(spec, draw(spec, 1001, dtype, scale, True), scale)


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
    spec = spec_of(name, n, d)
    assert_close(spec, draw(spec, tokens, torch.bfloat16, 1.0, True))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_gpu_most_logits(dtype: torch.dtype) -> None:
    """Eight streams and matrices of logits: the largest weights the kernels keep on chip."""
    kind = "softmax_matrix" if dtype == torch.bfloat16 else "softmax"
    spec = spec_of("sinkhorn", 8, 256, read=kind, write=kind)
    inputs = draw(spec, 33, dtype, 1.0, True)
    assert_close(spec, inputs)
    h, state = kernels.read(inputs["x"], inputs["weight"], inputs["bias"], spec)
    streams, mine, _ = kernels.write_read(h, state, inputs["weight"], inputs["bias"], spec)
    wanted, _ = kernels.read(streams, inputs["weight"], inputs["bias"], spec)
    assert (mine - wanted).double().norm() <= TOLERANCE[dtype][0] * wanted.double().norm()


@pytest.mark.parametrize("mean", [False, True])
def test_other_streams_than_those_read_get_their_own_gradient(mean: bool) -> None:
    spec = spec_of("cayley")
    inputs = draw(spec, 6, torch.float32, 1.0, True)
    other = draw(spec, 6, torch.float32, 1.0, True, seed=1)["x"]

    def gradients(fused: bool) -> tuple[Tensor, ...]:
        cast = (lambda t: t.clone()) if fused else (lambda t: t.double())
        x, z, weight, bias = (cast(t).requires_grad_() for t in (inputs["x"], other, inputs["weight"], inputs["bias"]))
        if fused:
            h, state = kernels.read(x, weight, bias, spec)
            out = kernels.write(h, state, z, mean)
        else:
            h, state = reference.read(x, weight, bias, spec)
            out = reference.write(z, h, state, spec)
            out = out.mean(1) if mean else out
        grad = inputs["grad"][:, 0] if mean else inputs["grad"]
        return torch.autograd.grad(out, (x, z, weight, bias), cast(grad))

    for mine, wanted in zip(gradients(True), gradients(False)):
        assert (mine.double() - wanted).norm() <= 2e-5 * wanted.norm()


def test_bad_input_is_named() -> None:
    spec = spec_of("cayley")
    inputs = draw(spec, 2, torch.float32, 1.0, True)
    with pytest.raises(ValueError, match="x must end in 4 streams of 24"):
        kernels.read(inputs["x"][:, :3], inputs["weight"], inputs["bias"], spec)
    with pytest.raises(ValueError, match="weight must be float32 of shape"):
        kernels.read(inputs["x"], inputs["weight"][:3], inputs["bias"], spec)
    with pytest.raises(ValueError, match="x must be float32, bfloat16 or float16"):
        kernels.read(inputs["x"].double(), inputs["weight"], inputs["bias"], spec)
    assert kernels.uncovered(spec, torch.float32) is None
    wide = spec_of("sinkhorn", 8, 256, read="softmax_matrix", write="softmax_matrix")
    assert kernels.uncovered(wide, torch.bfloat16) is None
    assert "fits on chip in bfloat16 only" in kernels.uncovered(wide, torch.float32)
    h, state = kernels.read(inputs["x"], inputs["weight"], inputs["bias"], spec)
    with pytest.raises(ValueError, match="y must be"):
        kernels.write(h[:, :8], state)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_gpu_mean_of_the_new_streams(dtype: torch.dtype) -> None:
    for settings in ({}, {"post_norm": True, "d": 512}, {"d": 2048}):
        spec = spec_of("sinkhorn", **settings)
        assert_close(spec, draw(spec, 1001, dtype, 1.0, True), mean=True)
