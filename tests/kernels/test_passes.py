"""What PyTorch may ask of the fused steps: graphs, strides, repetition."""

import pytest
import torch
import triton
from torch import Tensor

from jpmhc.connections import fused
from jpmhc.kernels import passes, write_read
from tests.kernels.connection_cases import draw, make_case, run

MATRICES = {"norm": "layer", "read": "softmax_matrix", "write": "softmax_matrix"}
# The package's two forms, and the paper's four variants with the gates of its tables.
CAPTURED = [
    ("cayley", {}),
    ("sinkhorn", {}),
    ("sinkhorn of the paper", {"norm": "rms", "read": "sigmoid", "write": "sigmoid"}),
    ("cayley, two iterations", MATRICES),
    ("grassmann", MATRICES),
    ("permutation", {"norm": "rms", "read": "softmax", "write": "sigmoid"}),
]


@pytest.mark.gpu
@pytest.mark.parametrize(("name", "settings"), CAPTURED)
def test_gpu_a_replayed_graph_gives_the_bits_of_eager_runs(name: str, settings: dict) -> None:
    """Forward and every gradient, from the streams of the capture and from others in their place."""
    case = make_case(name, d=512, **settings)
    inputs, others = (draw(case, 3001, torch.bfloat16, 1.0, True, seed) for seed in range(2))
    x, weight, bias = (inputs[k].clone() for k in ("x", "weight", "bias"))

    def both() -> tuple[Tensor, ...]:
        # New leaves in each call: autograd binds a leaf to the CUDA stream of its first use.
        leaves = [tensor.detach().requires_grad_() for tensor in (x, weight, bias)]
        h, state = fused.read_streams(*leaves, case.spec)
        out = fused.write_streams(h, state)
        return out.detach(), *torch.autograd.grad(out, leaves, inputs["grad"])

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            both()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = both()
    for given in (inputs, others):
        x.copy_(given["x"])
        graph.replay()
        wanted = both()
        assert all(torch.isfinite(value).all() for value in wanted)
        assert all(torch.equal(value, replayed) for value, replayed in zip(wanted, captured, strict=True))


@pytest.mark.gpu
def test_gpu_another_number_of_tokens_compiles_nothing_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    case = make_case("sinkhorn", d=64)
    run(case, draw(case, 48, torch.bfloat16, 1.0, True), True)
    compiled = []
    monkeypatch.setattr(triton.knobs.runtime, "jit_cache_hook", lambda **what: compiled.append(what["repr"]))
    for tokens in (1, 33, 64):
        run(case, draw(case, tokens, torch.bfloat16, 1.0, True), True)
    assert not compiled


def test_nothing_is_left_unwritten(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fill every buffer that the operators allocate with NaN first: one unwritten number would show."""
    case = make_case("cayley", d=40)
    inputs = draw(case, 9, torch.float32, 1.0, True)
    expected = run(case, inputs, True)
    for owner, name in ((torch, "empty"), (torch, "empty_like"), (Tensor, "new_empty")):
        original = getattr(owner, name)

        def poisoned(*args, original=original, **kwargs) -> Tensor:
            tensor = original(*args, **kwargs)
            return tensor.fill_(float("nan")) if tensor.is_floating_point() else tensor

        monkeypatch.setattr(owner, name, poisoned)
    for name, value in run(case, inputs, True).items():
        assert torch.equal(value, expected[name]), name


def test_leading_shape_strides_and_no_tokens() -> None:
    case = make_case("cayley")
    inputs = draw(case, 6, torch.float32, 1.0, True)
    x, weight, bias = inputs["x"], inputs["weight"], inputs["bias"]
    h, state = fused.read_streams(x, weight, bias, case.spec)
    strided = x.view(2, 3, 4, 24).transpose(0, 1)
    h2, state2 = fused.read_streams(strided, weight, bias, case.spec)
    assert torch.equal(h2, h.view(2, 3, 24).transpose(0, 1))
    assert torch.equal(fused.write_streams(h2, state2), fused.write_streams(h, state).view(2, 3, 4, 24).transpose(0, 1))
    empty = x[:0].clone().requires_grad_()
    weight = weight.clone().requires_grad_()
    h, state = fused.read_streams(empty, weight, bias, case.spec)
    out = fused.write_streams(h, state)
    assert out.shape == (0, 4, 24)
    grad_x, grad_weight = torch.autograd.grad(out.sum(), (empty, weight))
    assert grad_x.shape == empty.shape
    assert not grad_weight.any()


@pytest.mark.parametrize("post_norm", [False, True])
def test_only_gradients_that_nobody_else_holds_are_overwritten(post_norm: bool) -> None:
    """After a post-norm the streams' gradient takes the place of the link's; the given gradient never changes."""
    case = make_case("cayley", d=40, post_norm=post_norm)
    inputs = draw(case, 9, torch.float32, 1.0, True)
    x, weight, bias = (inputs[k].clone().requires_grad_() for k in ("x", "weight", "bias"))
    (h, state), given = fused.read_streams(x, weight, bias, case.spec), inputs["grad"].clone()
    sent: list[Tensor] = []
    state.link.register_hook(lambda grad: sent.append(grad))
    (grad_x,) = torch.autograd.grad(fused.write_streams(h, state), x, given)
    assert torch.equal(given, inputs["grad"])
    assert (sent[0].data_ptr() == grad_x.data_ptr()) == post_norm
    h, link, coef, _ = torch.ops.jpmhc.read(None, x, weight, bias, case.spec.key, True)  # an operator changes nothing
    out = torch.ops.jpmhc.write(link, x, h, coef, case.spec.key, False)
    assert torch.equal(torch.autograd.grad(out, x, given)[0], grad_x)


@pytest.mark.parametrize("post_norm", [False, True])
def test_a_chain_has_the_operators_gradients(post_norm: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a post-norm the gradients of a write and the next read come from one kernel."""
    case = make_case("cayley", d=40, post_norm=post_norm)
    monkeypatch.setattr(write_read, "one_gradient_kernel_pays", lambda *given: not post_norm)
    inputs = draw(case, 9, torch.float32, 1.0, True)
    x, weight, bias = (inputs[k].clone().requires_grad_() for k in ("x", "weight", "bias"))
    found = []
    for compiling in (False, True):
        monkeypatch.setattr(passes.torch.compiler, "is_compiling", lambda answer=compiling: answer)
        h, state = fused.read_streams(x, weight, bias, case.spec)
        for _ in range(2):
            _, h, state = fused.write_read_streams(h, state, weight, bias, case.spec)
        found.append(torch.autograd.grad(fused.write_streams(h, state), (x, weight, bias), inputs["grad"]))
    assert all(torch.equal(a, b) for a, b in zip(*found))
