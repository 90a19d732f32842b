"""Write and next read in one kernel, against the float64 reference and against two kernels."""

import pytest
import torch
from torch import Tensor

from jpmhc.connections import fused
from jpmhc.kernels import write_read
from jpmhc.kernels.write_read import one_gradient_kernel_pays, one_kernel_pays
from tests.kernels.connection_cases import TOLERANCE, copy_row, draw, make_case, run_row


def assert_chain_close(dtype: torch.dtype, d: int, tokens: int, post_norm: bool, held: int = 4) -> None:
    """Two connections in a row, with the streams between them used besides, so that every gradient path carries."""
    settings = {"d": d, "post_norm": post_norm, "norm": "rms" if post_norm else "layer"}
    first, second = make_case("sinkhorn", **settings), make_case("cayley", **settings)
    assert one_kernel_pays(first.spec, second.spec)  # else there would be nothing to compare
    inputs = draw(first, tokens, dtype, 1.0, True, held=held)
    other = draw(second, tokens, dtype, 1.0, True, seed=1)

    def run_chain(form: str) -> list[Tensor]:
        leaves = copy_row([inputs, other], form)
        _, between, h, out = run_row([first, second], leaves, form)
        upstream = [given["grad"].to(leaves[0].dtype) for given in (inputs, other)]
        return [between, h, out, *torch.autograd.grad((out, between), leaves, upstream)]

    wanted = run_chain("reference")
    for form in ("fused", "separate"):
        for i, (mine, value) in enumerate(zip(run_chain(form), wanted)):
            allowed = 2 * TOLERANCE[dtype][i > 2]
            assert torch.isfinite(mine).all()
            assert (mine.double() - value).norm() <= allowed * value.norm(), f"{form}, result {i}"


@pytest.mark.parametrize("post_norm", [False, True])
def test_equal_streams_held_once(post_norm: bool) -> None:
    assert_chain_close(torch.float32, 72, 19, post_norm, held=1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("post_norm", [False, True])
def test_write_read_matches_float64_and_the_separate_form(post_norm: bool, dtype: torch.dtype) -> None:
    assert_chain_close(dtype, 72, 19, post_norm)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_gpu_write_read(dtype: torch.dtype) -> None:
    for post_norm in (False, True):
        assert_chain_close(dtype, 512, 1001, post_norm)
        assert_chain_close(dtype, 512, 1001, post_norm, held=1)
        assert_chain_close(dtype, 200, 33, post_norm)


@pytest.mark.parametrize(
    ("settings", "decoded"),
    [
        ({"n": 8}, True),
        ({"post_norm": True}, False),
        ({"post_norm": True, "norm": "rms", "read": "softmax_matrix"}, False),
    ],
)
def test_two_kernels_where_one_does_not_pay(settings: dict, decoded: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same numbers; few tokens without gradients have a kernel of their own, unless a post-norm is in between."""
    case = make_case("cayley", d=16, **settings)
    assert not one_kernel_pays(case.spec, case.spec)
    inputs = draw(case, 5, torch.float32, 1.0, True)
    x, weight, bias, spec = inputs["x"], inputs["weight"], inputs["bias"], case.spec
    calls: list[str] = []
    for name in ("decode", "_launcher"):
        step = getattr(write_read, name)
        monkeypatch.setattr(write_read, name, lambda *given, name=name, step=step: calls.append(name) or step(*given))
    for gradients in (True, False):
        with torch.set_grad_enabled(gradients):
            h, state = fused.read_streams(x, weight, bias, spec)
            out, next_h, _ = fused.write_read_streams(h, state, weight, bias, spec)
            wanted = fused.write_streams(h, state)
            torch.testing.assert_close(out, wanted, rtol=1e-5, atol=1e-5)
            torch.testing.assert_close(next_h, fused.read_streams(wanted, weight, bias, spec)[0], rtol=1e-4, atol=1e-5)
    assert calls == (["decode"] if decoded else [])


def assert_stack_close(dtype: torch.dtype, tokens: int, name: str, n: int, d: int, **settings) -> None:
    """Three connections in a row; the last has a post-norm if the settings ask for one."""
    post_norm, delayed = settings.pop("post_norm", False), settings.pop("delayed", False)
    cases = [make_case(name, n, d, **settings) for _ in range(2)] + [make_case("cayley", n, d, post_norm=post_norm)]
    inputs = [draw(case, tokens, dtype, 1.0, True, seed=k) for k, case in enumerate(cases)]
    results = {}
    for form in ("fused", "reference"):
        leaves = copy_row(inputs, form)
        out = run_row(cases, leaves, form, delayed)[-1]
        results[form] = [out, *torch.autograd.grad(out, leaves, inputs[0]["grad"].to(out.dtype))]
    for i, (mine, value) in enumerate(zip(results["fused"], results["reference"])):
        assert torch.isfinite(mine).all()
        error = (mine.double() - value).norm() / value.norm()
        assert error <= 2 * TOLERANCE[dtype][i > 0], f"result {i}: {error:.1e}"


@pytest.mark.parametrize(
    ("name", "n", "d", "tokens", "dtype", "settings"),
    [
        ("sinkhorn", 4, 72, 19, torch.float32, {}),
        ("cayley", 4, 64, 16, torch.float16, {"norm": "rms", "post_norm": True}),
        ("kronecker", 4, 24, 5, torch.float32, {"norm": "rms_outside", "eps": 0.3, "read": "sigmoid"}),
        ("unconstrained", 2, 40, 35, torch.float16, {}),
        ("permutation", 2, 8, 3, torch.float32, {"write": "softmax_matrix"}),
        ("cayley", 4, 72, 19, torch.float32, {"delayed": True}),
        ("kronecker", 2, 64, 16, torch.float16, {"delayed": True, "norm": "rms", "post_norm": True}),
    ],
)
def test_gradients_of_the_write_and_the_next_read_in_one_kernel(
    name: str, n: int, d: int, tokens: int, dtype: torch.dtype, settings: dict, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[None] = []
    step = write_read._differentiate_both
    monkeypatch.setattr(write_read, "_differentiate_both", lambda *given: calls.append(None) or step(*given))
    monkeypatch.setattr(write_read, "one_gradient_kernel_pays", lambda *given: True)
    empty = torch.empty_like
    monkeypatch.setattr(torch, "empty_like", lambda t: empty(t).fill_(float("nan")))  # shows what is not written
    assert_stack_close(dtype, tokens, name, n, d, **settings)
    assert len(calls) == 2


@pytest.mark.parametrize(
    ("name", "n", "d", "tokens", "dtype", "settings"),
    [
        ("sinkhorn of DeepSeek-V4", 4, 72, 19, torch.float32, {"norm": "rms", "read": "sigmoid", "read_eps": 1e-6}),
        ("cayley", 4, 136, 16, torch.float16, {"norm": "rms"}),
        ("rotation", 2, 8, 1, torch.float32, {}),
        ("unconstrained", 8, 16, 5, torch.float32, {}),
        ("identity", 4, 40, 3, torch.float32, {"post_norm": True}),
    ],
)
def test_delayed_reads_match_float64(
    name: str, n: int, d: int, tokens: int, dtype: torch.dtype, settings: dict, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each sublayer's input has the read weights of the connection before it."""
    empty = torch.empty_like
    monkeypatch.setattr(torch, "empty_like", lambda t: empty(t).fill_(float("nan")))  # shows what is not written
    assert_stack_close(dtype, tokens, name, n, d, delayed=True, **settings)


@pytest.mark.parametrize("gradients", [True, False])
@pytest.mark.parametrize("settings", [{}, {"post_norm": True, "norm": "rms"}, {"n": 8}])
def test_a_delayed_read_is_that_of_separate_kernels(settings: dict, gradients: bool) -> None:
    """Without gradients few tokens have the decoding kernel; a post-norm and eight streams have separate kernels."""
    case = make_case("cayley", d=24, **settings)
    inputs = draw(case, 5, torch.float32, 1.0, True)
    x, weight, bias, spec = inputs["x"], inputs["weight"], inputs["bias"], case.spec
    with torch.set_grad_enabled(gradients):
        y, state = fused.read_streams(x, weight, bias, spec)
        out, h, following = fused.write_read_streams(y, state, weight, bias, spec, delayed=True)
        wanted = fused.write_streams(y, state)
        torch.testing.assert_close(out, wanted, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(h, state.gather(wanted), rtol=1e-5, atol=1e-5)
        separate = fused.read_streams(wanted, weight, bias, spec)[1]
        torch.testing.assert_close(following.coefficients, separate.coefficients, rtol=1e-4, atol=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("delayed", [False, True])
@pytest.mark.parametrize(("n", "d", "tokens"), [(4, 512, 1001), (4, 200, 33), (2, 1000, 65)])
def test_gpu_gradients_in_one_kernel(n: int, d: int, tokens: int, delayed: bool) -> None:
    for post_norm in (False, True):
        assert_stack_close(torch.bfloat16, tokens, "rotation", n, d, post_norm=post_norm, delayed=delayed)


@pytest.mark.gpu
def test_gpu_delayed_reads() -> None:
    settings = {"norm": "rms", "read": "sigmoid", "read_eps": 1e-6, "delayed": True}
    assert_stack_close(torch.bfloat16, 1001, "sinkhorn of DeepSeek-V4", 4, 512, **settings)


def test_where_one_gradient_kernel_pays() -> None:
    def pays(name: str, n: int = 4, d: int = 512, dtype: torch.dtype = torch.bfloat16, **settings) -> bool:
        spec = make_case(name, n, d, **settings).spec
        return one_gradient_kernel_pays(spec, spec, dtype)

    assert pays("cayley")
    assert pays("sinkhorn", 2)
    assert pays("cayley", d=128)
    assert not pays("sinkhorn")
    assert not pays("cayley", 8)
    assert not pays("cayley", d=64)
    assert not pays("cayley", post_norm=True)
    assert not pays("cayley", dtype=torch.float16)
    assert not pays("cayley", dtype=torch.float32)
