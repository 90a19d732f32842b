"""Models with connections are exported: the graph computes what the model computes. See docs/guides/export.md."""

import pytest
import torch
from benchmarks.check_export import DIM, STREAMS, make_model, run_exported, run_onnx
from torch import nn

import jpmhc

X = torch.randn(2, 5, DIM, generator=torch.Generator().manual_seed(0))


@pytest.fixture(params=jpmhc.MIXERS)
def model(request):
    with torch.no_grad():
        yield make_model(request.param)


def test_a_graph_of_torch_export_takes_other_sizes(model):
    assert run_exported(model, X) == pytest.approx(model(X), abs=1e-5)


def test_a_trace_takes_other_sizes(model):
    traced = torch.jit.trace(model, (torch.randn(3, 7, DIM),))
    assert traced(X) == pytest.approx(model(X), abs=1e-5)


def test_an_onnx_file_computes_the_same(model):
    pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    assert run_onnx(model, X) == pytest.approx(model(X), abs=1e-4)


def test_scripting_is_refused_by_torch():
    with pytest.raises(Exception, match="can't take variable number of arguments"):
        torch.jit.script(make_model("identity"))


def test_inductor_scales_the_logits():
    """Inductor drops the factor in torch.add(bias, linear(x), alpha=factor); the coefficients must not depend on it."""
    torch.manual_seed(0)
    block = jpmhc.HyperConnection(nn.Identity(), DIM, STREAMS, "identity")
    with torch.no_grad():
        for parameter in block.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
        x = torch.randn(3, STREAMS, DIM)
        assert torch.compile(block)(x) == pytest.approx(block(x), abs=1e-5)
