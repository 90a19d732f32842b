"""The fused steps inside a compiled graph: without a break, and with the numbers of eager mode."""

import functools

import pytest
import torch
from torch import Tensor

from jpmhc.connections import fused
from tests.kernels.connection_cases import Case, draw, make_case


def run_connection(case: Case, bias: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    h, state = fused.read_streams(x, weight, bias, case.spec)
    return fused.write_streams(torch.tanh(h), state)


@pytest.mark.gpu
def test_gpu_compiles_with_cuda_graphs() -> None:
    case = make_case("cayley", d=128)
    inputs = draw(case, 64, torch.bfloat16, 1.0, True)
    connection = functools.partial(run_connection, case, inputs["bias"])
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


@pytest.mark.parametrize("delayed", [False, True])
def test_compiles_without_a_break(delayed: bool) -> None:
    case = make_case("sinkhorn")
    inputs = draw(case, 6, torch.float32, 1.0, True)
    bias = inputs["bias"]

    def connections(x: Tensor, weight: Tensor) -> Tensor:
        h, state = fused.read_streams(x, weight, bias, case.spec)
        _, h, state = fused.write_read_streams(torch.tanh(h), state, weight, bias, case.spec, delayed)
        return fused.write_streams(torch.tanh(h), state)

    results = []
    for function in (connections, torch.compile(connections, backend="aot_eager", fullgraph=True)):
        x, weight = (inputs[k].clone().requires_grad_() for k in ("x", "weight"))
        out = function(x, weight)
        results.append((out, *torch.autograd.grad(out, (x, weight), inputs["grad"])))
    for eager, compiled in zip(*results):
        assert torch.equal(eager, compiled)
