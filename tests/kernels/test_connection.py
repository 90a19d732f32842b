"""The fused connection against the float64 reference: forward and every gradient, and what autograd may ask of it."""

import os

import pytest
import reference
import torch
from torch import Tensor

from jpmhc import kernels
from jpmhc.kernels import Spec
from jpmhc.kernels.write_to_read import pays

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# ‖out - reference‖ / ‖reference‖ for the results and for the gradients. Half types: the rounding of the streams and of
# the weight that the tensor cores multiply by; the logits' scale multiplies the second.
TOLERANCE = {torch.float32: (2e-6, 2e-5), torch.float16: (2e-3, 4e-3), torch.bfloat16: (8e-3, 2e-2)}
PERMUTATIONS = ((0, 1, 2, 3), (1, 0, 3, 2), (2, 3, 0, 1), (3, 2, 1, 0), (1, 2, 3, 0), (0, 2, 1, 3))
MIXERS = {
    "identity": {},
    "unconstrained": {},
    "sinkhorn": {"iterations": 20},
    "cayley": {},
    "cayley-2": {"iterations": 2},
    "grassmann-2": {"rank": 2},
    "grassmann-3": {"rank": 3},
    "permutation": {"permutations": PERMUTATIONS},
    "kronecker": {},
}


def spec_of(name: str, n: int = 4, d: int = 24, **settings) -> Spec:
    return Spec(n, d, mixer=name.split("-")[0], **{**MIXERS[name], **settings})


def draw(
    spec: Spec, tokens: int, dtype: torch.dtype, scale: float, dynamic: bool, seed: int = 0, held: int | None = None
) -> dict[str, Tensor | None]:
    """`held`: how many streams x holds; one stands for n equal ones."""
    generator = torch.Generator().manual_seed(seed)
    width = spec.n * spec.d

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    weight = scale * normal(spec.logits, width) / width**0.5
    return {
        "x": (normal(tokens, held or spec.n, spec.d) + 0.3).to(DEVICE, dtype),
        "weight": weight.to(DEVICE) if dynamic else None,
        "bias": (normal(spec.logits) * (0.3 if dynamic else scale)).to(DEVICE),
        "sublayer": (normal(spec.d, spec.d) / spec.d**0.5).to(DEVICE),
        "grad": normal(tokens, spec.n, spec.d).to(DEVICE, dtype),
    }


def run(spec: Spec, inputs: dict[str, Tensor | None], fused: bool) -> dict[str, Tensor]:
    """h, out and the gradients of everything that has one, fused or by the reference in float64."""
    cast = (lambda t: t.detach().clone()) if fused else (lambda t: t.detach().double())
    leaves = {k: cast(inputs[k]).requires_grad_() for k in ("x", "weight", "bias") if inputs[k] is not None}
    x, weight, bias = leaves["x"], leaves.get("weight"), leaves["bias"]
    sublayer = inputs["sublayer"].double()
    if fused:
        h, state = kernels.read(x, weight, bias, spec)
        y = torch.tanh(h.double() @ sublayer).to(x.dtype)
        out = kernels.write(y, state)
    else:
        streams = x.expand(-1, spec.n, -1)
        h, state = reference.read(streams, weight, bias, spec)
        y = torch.tanh(h @ sublayer)
        out = reference.write(streams, y, state, spec)
    gradients = torch.autograd.grad(out, list(leaves.values()), cast(inputs["grad"]))
    return {"h": h, "out": out} | {f"grad {k}": g for k, g in zip(leaves, gradients)}


def assert_close(spec: Spec, inputs: dict[str, Tensor | None], scale: float = 1.0) -> None:
    fused, wanted = run(spec, inputs, True), run(spec, inputs, False)
    forward, gradient = TOLERANCE[inputs["x"].dtype]
    for name, value in fused.items():
        assert torch.isfinite(value).all(), name
        error = (value.double() - wanted[name]).norm() / wanted[name].norm().clamp(min=1e-30)
        allowed = (gradient if name.startswith("grad") else forward) * max(1.0, scale)
        if spec.mixer == "grassmann" and inputs["x"].dtype != torch.float32:
            allowed *= 5  # a nearly singular frame multiplies the rounding of the weight
        assert error <= allowed, f"{name}: {error:.1e}"


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


def assert_chain_close(dtype: torch.dtype, d: int, tokens: int, post_norm: bool, held: int = 4) -> None:
    """Two connections in a row, with the streams between them used besides, so that every gradient path carries."""
    first, second = spec_of("sinkhorn", d=d, post_norm=post_norm), spec_of("cayley", d=d, post_norm=post_norm)
    assert pays(first, second)  # else there would be nothing to compare
    inputs = draw(first, tokens, dtype, 1.0, True, held=held)
    other = draw(second, tokens, dtype, 1.0, True, seed=1)

    def run_chain(form: str) -> list[Tensor]:
        cast = (lambda t: t.double()) if form == "reference" else (lambda t: t.clone())
        tensors = (inputs["x"], inputs["weight"], inputs["bias"], other["weight"], other["bias"])
        x, w1, b1, w2, b2 = leaves = [cast(t).requires_grad_() for t in tensors]
        if form == "reference":
            streams = x.expand(-1, first.n, -1)
            h, state = reference.read(streams, w1, b1, first)
            between = reference.write(streams, torch.tanh(h), state, first)
            h, state = reference.read(between, w2, b2, second)
            out = reference.write(between, torch.tanh(h), state, second)
        else:
            h, state = kernels.read(x, w1, b1, first)
            if form == "fused":
                between, h, state = kernels.write_read(torch.tanh(h), state, w2, b2, second)
            else:
                between = kernels.write(torch.tanh(h), state)
                h, state = kernels.read(between, w2, b2, second)
            out = kernels.write(torch.tanh(h), state)
        gradients = torch.autograd.grad((out, between), leaves, (cast(inputs["grad"]), cast(other["grad"])))
        return [between, h, out, *gradients]

    wanted = run_chain("reference")
    for form in ("fused", "separate"):
        for i, (mine, value) in enumerate(zip(run_chain(form), wanted)):
            allowed = 2 * TOLERANCE[dtype][i > 2]
            assert torch.isfinite(mine).all()
            assert (mine.double() - value).norm() <= allowed * value.norm(), f"{form}, result {i}"


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
    if dynamic:
        assert_chain_close(torch.float32, 72, 19, spec.post_norm, held=1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("post_norm", [False, True])
def test_write_read_matches_float64_and_the_separate_form(post_norm: bool, dtype: torch.dtype) -> None:
    assert_chain_close(dtype, 72, 19, post_norm)


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_gpu_write_read(dtype: torch.dtype) -> None:
    for post_norm in (False, True):
        assert_chain_close(dtype, 512, 1001, post_norm)
        assert_chain_close(dtype, 512, 1001, post_norm, held=1)
        assert_chain_close(dtype, 200, 33, post_norm)


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="needs a CUDA device")
@pytest.mark.parametrize("name", MIXERS)
def test_gpu_every_mixer(name: str) -> None:
    spec = spec_of(name, d=128)
    for scale in (1.0, 4.0, 10.0):
        assert_close(spec, draw(spec, 1001, torch.bfloat16, scale, True), scale)


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("name", ["cayley", "sinkhorn"])
def test_gpu_every_type(name: str, dtype: torch.dtype) -> None:
    spec = spec_of(name, d=128, post_norm=True, norm="rms", read="sigmoid", write="softmax_matrix")
    for scale in (1.0, 4.0, 10.0):
        assert_close(spec, draw(spec, 1001, dtype, scale, True), scale)


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="needs a CUDA device")
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
@pytest.mark.skipif(DEVICE == "cpu", reason="needs a CUDA device")
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


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="needs a CUDA device")
@pytest.mark.parametrize("name", ["cayley", "sinkhorn"])
def test_gpu_runs_agree_in_every_bit(name: str) -> None:
    """Twice eager, and once from a CUDA graph."""
    spec = spec_of(name, d=512)
    inputs = draw(spec, 3001, torch.bfloat16, 1.0, True)
    first, second = run(spec, inputs, True), run(spec, inputs, True)
    x, weight, bias = (inputs[k].clone().requires_grad_() for k in ("x", "weight", "bias"))

    def gradients() -> tuple[Tensor, ...]:
        h, state = kernels.read(x, weight, bias, spec)
        return torch.autograd.grad(kernels.write(h, state), (x, weight, bias), inputs["grad"])

    eager = gradients()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        gradients()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = gradients()
    graph.replay()
    torch.cuda.synchronize()
    assert all(torch.equal(first[key], second[key]) for key in first)
    assert all(torch.equal(a, b) for a, b in zip(eager, captured))


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="needs a CUDA device")
def test_gpu_compiles_with_cuda_graphs() -> None:
    spec = spec_of("cayley", d=128)
    inputs = draw(spec, 64, torch.bfloat16, 1.0, True)
    bias = inputs["bias"]

    def connection(x: Tensor, weight: Tensor) -> Tensor:
        h, state = kernels.read(x, weight, bias, spec)
        return kernels.write(torch.tanh(h), state)

    compiled = torch.compile(connection, fullgraph=True, mode="reduce-overhead")
    x, weight = (inputs[k].clone().requires_grad_() for k in ("x", "weight"))
    for _ in range(3):  # the third call replays
        torch.compiler.cudagraph_mark_step_begin()
        out = compiled(x, weight)
        gradients = [g.clone() for g in torch.autograd.grad(out, (x, weight), inputs["grad"])]
    expected = connection(x, weight)
    assert (out - expected).double().norm() <= 8e-3 * expected.double().norm()
    for mine, wanted in zip(gradients, torch.autograd.grad(expected, (x, weight), inputs["grad"])):
        assert (mine.double() - wanted.double()).norm() <= 2e-2 * wanted.double().norm()


def test_nothing_is_left_unwritten(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fill every buffer that the operators allocate with NaN first: one unwritten number would show."""
    spec = spec_of("cayley", d=40)
    inputs = draw(spec, 9, torch.float32, 1.0, True)
    expected = run(spec, inputs, True)
    for owner, name in ((torch, "empty"), (torch, "empty_like"), (Tensor, "new_empty")):
        original = getattr(owner, name)

        def poisoned(*args, original=original, **kwargs) -> Tensor:
            tensor = original(*args, **kwargs)
            return tensor.fill_(float("nan")) if tensor.is_floating_point() else tensor

        monkeypatch.setattr(owner, name, poisoned)
    for name, value in run(spec, inputs, True).items():
        assert torch.equal(value, expected[name]), name


def test_other_streams_than_those_read_get_their_own_gradient() -> None:
    spec = spec_of("cayley")
    inputs = draw(spec, 6, torch.float32, 1.0, True)
    other = draw(spec, 6, torch.float32, 1.0, True, seed=1)["x"]

    def gradients(fused: bool) -> tuple[Tensor, ...]:
        cast = (lambda t: t.clone()) if fused else (lambda t: t.double())
        x, z, weight, bias = (cast(t).requires_grad_() for t in (inputs["x"], other, inputs["weight"], inputs["bias"]))
        if fused:
            h, state = kernels.read(x, weight, bias, spec)
            out = kernels.write(h, state, z)
        else:
            h, state = reference.read(x, weight, bias, spec)
            out = reference.write(z, h, state, spec)
        return torch.autograd.grad(out, (x, z, weight, bias), cast(inputs["grad"]))

    for mine, wanted in zip(gradients(True), gradients(False)):
        assert (mine.double() - wanted).norm() <= 2e-5 * wanted.norm()


def test_leading_shape_strides_and_no_tokens() -> None:
    spec = spec_of("cayley")
    inputs = draw(spec, 6, torch.float32, 1.0, True)
    x, weight, bias = inputs["x"], inputs["weight"], inputs["bias"]
    h, state = kernels.read(x, weight, bias, spec)
    strided = x.view(2, 3, 4, 24).transpose(0, 1)
    h2, state2 = kernels.read(strided, weight, bias, spec)
    assert torch.equal(h2, h.view(2, 3, 24).transpose(0, 1))
    assert torch.equal(kernels.write(h2, state2), kernels.write(h, state).view(2, 3, 4, 24).transpose(0, 1))
    empty = x[:0].clone().requires_grad_()
    weight = weight.clone().requires_grad_()
    h, state = kernels.read(empty, weight, bias, spec)
    out = kernels.write(h, state)
    assert out.shape == (0, 4, 24)
    grad_x, grad_weight = torch.autograd.grad(out.sum(), (empty, weight))
    assert grad_x.shape == empty.shape
    assert not grad_weight.any()


def test_compiles_without_a_break() -> None:
    spec = spec_of("sinkhorn")
    inputs = draw(spec, 6, torch.float32, 1.0, True)
    bias = inputs["bias"]

    def connection(x: Tensor, weight: Tensor) -> Tensor:
        inside = Spec(4, 24, mixer="sinkhorn", iterations=20)  # made where it is traced, as a module may do
        h, state = kernels.read(x, weight, bias, inside)
        return kernels.write(torch.tanh(h), state)

    results = []
    for function in (connection, torch.compile(connection, backend="aot_eager", fullgraph=True)):
        x, weight = (inputs[k].clone().requires_grad_() for k in ("x", "weight"))
        out = function(x, weight)
        results.append((out, *torch.autograd.grad(out, (x, weight), inputs["grad"])))
    for eager, compiled in zip(*results):
        assert torch.equal(eager, compiled)


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
    for settings, message in (
        ({"n": 3, "d": 8}, "n must be one of 2, 4, 8"),
        ({"n": 4, "d": 12}, "multiple of 8"),
        ({"n": 4, "d": 8, "mixer": "sinkhorn"}, "positive number of iterations"),
        ({"n": 4, "d": 8, "mixer": "grassmann", "rank": 5}, "rank between 1 and n = 4"),
        ({"n": 4, "d": 8, "mixer": "permutation", "permutations": ((0, 0, 1, 2),)}, "rearrange"),
    ):
        with pytest.raises(ValueError, match=message):
            Spec(**settings)


@pytest.mark.skipif(DEVICE == "cuda", reason="on a device the kernels are compiled")
def test_interpreter_is_in_use() -> None:
    assert os.environ["TRITON_INTERPRET"] == "1"
