"""Recorded connections and layers: coefficients, gains, gradients, and the product of a token's layers."""

import pytest
import torch
from torch import nn

import jpmhc
from jpmhc.diagnose.layers import (
    effective_coefficients,
    measure_gain,
    measure_gradients,
    measure_streams,
    measure_sublayer,
    stream_dominance,
    stream_rank,
    stream_similarity,
)
from jpmhc.diagnose.record import Recording, find_layers, longest_chain, record_layers
from jpmhc.diagnose.theory import compose_layers, token_coefficients
from tests.diagnose.models import StreamNet, TinyLanguageModel, make_mlp


def record(model, x):
    recording = Recording()
    with record_layers(model, find_layers(model), recording):
        y = model(x)
    return recording.calls, y


@pytest.mark.parametrize("mixer", ["cayley", "sinkhorn"])
def test_recording_changes_nothing_and_has_the_tokens_coefficients(mixer):
    torch.manual_seed(0)
    model = StreamNet(mixer=mixer)
    x = torch.randn(2, 3, 12)
    calls, y = record(model, x)
    torch.testing.assert_close(y, model(x))
    assert [call.name for call in calls] == [f"stack.connections.{i}" for i in range(4)]
    assert longest_chain(calls) == calls
    streams = jpmhc.expand_streams(x, 4)
    for block, call in zip(model.stack.connections, calls):
        torch.testing.assert_close(call.before, streams)
        for found, exact in zip(call.coefficients, block.coefficients(streams)):
            torch.testing.assert_close(found, exact)
        streams = block(streams)
        torch.testing.assert_close(call.after, streams)


@pytest.mark.parametrize("post_norm", [None, "rms"])
def test_a_chain_of_static_connections_is_the_product_of_its_layers(post_norm):
    """∏ (H ⊗ 1 + w rᵀ ⊗ F′) of the recorded parts is autograd's Jacobian; with a norm, up to the norm's rank one."""
    torch.manual_seed(0)
    model = StreamNet(dynamic=False, post_norm=post_norm).double()
    x = torch.randn(5, 12, dtype=torch.float64)
    calls, _ = record(model, x.requires_grad_())
    skips, matrices = zip(*(measure_sublayer(call, 3, 8, batched=False) for call in calls))
    product = compose_layers(token_coefficients(calls, skips, 3), matrices)
    point = jpmhc.expand_streams(x, 4).detach()[3]
    exact = torch.func.jacrev(lambda t: model.stack(t[None])[0])(point).reshape(48, 48)
    if post_norm is None:
        torch.testing.assert_close(product, exact)
    else:
        project = torch.eye(48, dtype=torch.float64)
        after = calls[-1].after.detach()[3]
        for stream in range(4):
            rows = slice(12 * stream, 12 * stream + 12)
            project[rows, rows] -= torch.outer(after[stream], after[stream]) / 12
        last = compose_layers(token_coefficients(calls[-1:], skips[-1:], 3), matrices[-1:])
        block = model.stack.connections[-1]
        step = torch.func.jacrev(lambda t: block(t[None])[0])(calls[-1].before.detach()[3]).reshape(48, 48)
        torch.testing.assert_close(project @ last, step, rtol=1e-5, atol=1e-6)


def test_gains_and_gradients_are_mean_squared_singular_values():
    torch.manual_seed(0)
    model = StreamNet(dim=10, depth=3).double()
    calls, y = record(model, torch.randn(4, 10, dtype=torch.float64).requires_grad_())
    vectors = torch.randn(4000, 40, dtype=torch.float64)
    call = calls[1]
    exact = torch.autograd.functional.jacobian(call.module.sublayer, call.inside.detach()).reshape(40, 40)
    rest = exact - exact.diagonal().mean() * torch.eye(40, dtype=torch.float64)
    assert measure_gain(call, vectors)[1] == pytest.approx(float(rest.square().sum() / 40), rel=0.03)
    at_token = exact.reshape(4, 10, 4, 10)[2, :, 2]
    skip, matrix = measure_sublayer(call, 2, 4, batched=True)
    estimate = measure_gain(call, vectors, 2)
    rest = at_token - at_token.diagonal().mean() * torch.eye(10, dtype=torch.float64)
    assert estimate.gain == pytest.approx(float(rest.square().sum() / 10), rel=0.05)
    assert abs(float(torch.linalg.eigvalsh(matrix + matrix.mT).quantile(0.5))) < 1e-12
    torch.testing.assert_close(matrix + skip * torch.eye(10, dtype=torch.float64), at_token)
    rows = torch.stack([torch.autograd.grad(y.flatten()[i], call.output, retain_graph=True)[0] for i in range(40)])
    found = measure_gradients(calls, y, vectors[:800])
    assert found[1] == pytest.approx(float(rows.square().sum() / 40), rel=0.05)


def test_a_plain_layer_is_a_multiple_of_the_identity_and_the_rest():
    torch.manual_seed(0)
    layer = nn.Linear(20, 20, bias=False).double()
    with torch.no_grad():
        layer.weight.add_(0.7 * torch.eye(20))
    model = nn.Sequential(layer, nn.Linear(20, 20).double())
    calls, _ = record(model, torch.randn(2, 20, dtype=torch.float64).requires_grad_())
    skip, rest = measure_sublayer(calls[0], 1, 20, batched=True)
    assert skip == pytest.approx(0.7, abs=0.1)
    torch.testing.assert_close(rest + skip * torch.eye(20, dtype=torch.float64), layer.weight.detach())
    estimated = measure_gain(calls[0], torch.randn(4000, 40, dtype=torch.float64))
    assert estimated[0] == pytest.approx(skip, rel=0.03)
    assert estimated[1] == pytest.approx(float(rest.square().sum() / 20), rel=0.1)


def test_layers_of_a_plain_model_are_its_longest_list_of_like_modules():
    model = TinyLanguageModel()
    assert find_layers(model) == list(model.layers)
    assert find_layers(nn.Linear(3, 3)) == []
    for layer in model.layers:
        layer.experts = nn.ModuleList(nn.Linear(3, 3) for _ in range(5))
    assert find_layers(model) == list(model.layers)
    calls, _ = record(model, torch.randint(0, 20, (1, 4)))
    assert len(longest_chain(calls)) == 2


def test_streams_that_are_changed_on_their_way_break_the_chain():
    class Net(StreamNet):
        def forward(self, x):
            first, second, third, fourth = self.stack.connections
            x = third(second(2 * first(jpmhc.expand_streams(x, 4))))
            return fourth(x)

    calls, _ = record(Net(), torch.randn(2, 12, requires_grad=True))
    assert [call.name[-1] for call in longest_chain(calls)] == ["1", "2", "3"]


def test_streams_given_once_are_recorded_as_n():
    stack = jpmhc.HyperConnectionStack([jpmhc.HyperConnection(make_mlp(8), 8, 4, index=i) for i in range(2)])
    x = torch.randn(3, 1, 8)
    calls, y = record(stack, x)
    torch.testing.assert_close(y, stack(x))
    assert calls[0].before.shape == (3, 4, 8)


def test_products_of_known_skips():
    """Constant bistochastic skips (1 − ε) I + ε 11ᵀ/n shrink differences by (1 − ε) a layer and keep the mean."""
    model = StreamNet(depth=5, dynamic=False, mixer="unconstrained")
    skip = 0.7 * torch.eye(4) + 0.3 / 4
    with torch.no_grad():
        for block in model.stack.connections:
            sizes = block.map.sizes
            block.map.bias[sum(sizes[:2]) :] = skip.flatten()
    calls, _ = record(model, torch.randn(6, 12, requires_grad=True))
    torch.testing.assert_close(effective_coefficients(calls[0])[2][0].float(), skip)
    found = measure_streams(calls)
    torch.testing.assert_close(
        found.product, torch.tensor([1, 0.7**5, 0.7**5, 0.7**5], dtype=torch.float64), atol=1e-6, rtol=1e-5
    )
    assert found.geometric_mean == pytest.approx(0.7 ** (5 * 3 / 4), rel=1e-5)
    assert found.direct == pytest.approx(1, abs=1e-6)


def test_similarity_and_dominance():
    x = torch.randn(3, 1, 8).expand(3, 4, 8)
    assert float(stream_similarity(x)) == pytest.approx(1, abs=1e-6)
    assert float(stream_dominance(x)) == pytest.approx(0.25)
    apart = torch.eye(4, 8) * torch.tensor([3.0, 1, 1, 1])[:, None]
    assert float(stream_similarity(apart[None])) == pytest.approx(0, abs=1e-7)
    assert float(stream_dominance(apart[None])) == pytest.approx(0.75)


def test_effective_rank():
    x = torch.randn(3, 1, 8).expand(3, 4, 8)
    assert float(stream_rank(x)) == pytest.approx(1, abs=1e-6)
    assert float(stream_rank(5 * torch.eye(4, 8)[None])) == pytest.approx(4)
    apart = torch.randn(6, 4, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    squares = torch.linalg.svdvals(apart) ** 2
    assert float(stream_rank(apart)) == pytest.approx(float((squares.sum(-1) ** 2 / (squares**2).sum(-1)).mean()))


def test_a_few_directions_do_not_make_up_the_identity():
    """Two directions of eigenvalue 20 have a mean diagonal of 1 over 40 features; all others have eigenvalue 0.5."""
    torch.manual_seed(0)
    basis = torch.linalg.qr(torch.randn(40, 2, dtype=torch.float64))[0]
    layer = nn.Linear(40, 40, bias=False).double()
    with torch.no_grad():
        layer.weight.mul_(0.1).add_(0.5 * torch.eye(40)).add_(20 * basis @ basis.mT)
    calls, _ = record(
        nn.Sequential(layer, nn.Linear(40, 40).double()), torch.randn(2, 40, dtype=torch.float64).requires_grad_()
    )
    assert measure_sublayer(calls[0], 0, 40, batched=True)[0] == pytest.approx(0.5, abs=0.05)
