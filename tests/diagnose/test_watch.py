"""Watching during training: what is logged, and that training does not notice."""

import warnings

import pytest
import torch
from torch import nn

import jpmhc
from jpmhc.diagnose.layers import measure_streams, stream_similarity
from tests.diagnose.models import StreamNet, TinyLanguageModel


def train(model, steps):
    torch.manual_seed(1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(steps):
        x = torch.randn(8, 12)
        (model(x) - x.roll(1, -1)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [p.detach().clone() for p in model.parameters()]


def test_training_is_the_same_and_every_so_many_steps_are_logged():
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(StreamNet(mixer="sinkhorn"))
    plain = train(models[0], 7)
    logged = {}
    with jpmhc.diagnose.watch(models[1], every=3, log=lambda step, numbers: logged.update({step: numbers})) as seen:
        watched = train(models[1], 7)
    assert all(torch.equal(a, b) for a, b in zip(plain, watched))
    assert list(logged) == [1, 4, 7]
    assert [record["step"] for record in seen.records] == [1, 4, 7]
    assert not models[1]._forward_hooks
    train(models[1], 3)
    assert seen.step == 7


def test_the_numbers_are_those_of_the_model(capsys):
    torch.manual_seed(0)
    model = StreamNet(mixer="sinkhorn", dynamic=False)
    x = torch.randn(5, 12)
    with jpmhc.diagnose.watch(model) as seen:
        model(x)
    skips = [
        block.coefficients(jpmhc.expand_streams(x, 4)).skip[0].detach().double() for block in model.stack.connections
    ]
    values = torch.linalg.svdvals(skips[3] @ skips[2] @ skips[1] @ skips[0])
    (found,) = seen.records
    apart = sum(float((skip - torch.eye(4)).square().sum().sqrt()) for skip in skips) / 4
    assert apart > 0.01
    assert found["skips/distance"] == pytest.approx(apart, rel=1e-4)
    assert found["skips/smallest"] == pytest.approx(float(values[-1]), rel=1e-4)
    assert found["skips/geometric_mean"] == pytest.approx(float(values.log().mean().exp()), rel=1e-3)
    out = model.stack(jpmhc.expand_streams(x, 4))
    assert found["similarity"] == pytest.approx(float(stream_similarity(out)), rel=1e-4)
    assert "step 1: skips/distance" in capsys.readouterr().out


def test_accumulated_gradients_are_one_step_and_a_resumed_run_goes_on_counting():
    torch.manual_seed(0)
    model = StreamNet()
    optimizers = [
        torch.optim.SGD(model.parameters(), 0.1),
        torch.optim.SGD(model.stack.connections[0].parameters(), 0.1),
    ]
    other = torch.optim.SGD(nn.Linear(2, 2).parameters(), 0.1)
    with jpmhc.diagnose.watch(model, every=5, log=lambda step, numbers: None, start=100) as seen:
        for _ in range(11):
            for _ in range(4):
                model(torch.randn(2, 12)).square().mean().backward()
                other.step()
            for optimizer in optimizers:
                optimizer.step()
    assert seen.step == 111
    assert [record["step"] for record in seen.records] == [101, 106, 111]


def test_only_the_first_process_logs(monkeypatch):
    model, logged = StreamNet(), []
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    for rank in (1, 0):
        monkeypatch.setattr(torch.distributed, "get_rank", lambda rank=rank: rank)
        with jpmhc.diagnose.watch(model, log=lambda step, numbers, rank=rank: logged.append(rank)) as seen:
            model(torch.randn(2, 12))
        assert len(seen.records) == 1
    assert logged == [0]


def test_evaluation_is_not_counted():
    model = StreamNet().eval()
    with jpmhc.diagnose.watch(model, every=1) as seen:
        model(torch.randn(2, 12))
    assert seen.step == 0


def test_a_plain_model_logs_gains_and_a_bare_one_is_refused():
    model = TinyLanguageModel()
    with jpmhc.diagnose.watch(model, every=1, log=lambda step, numbers: None) as seen:
        model(torch.randint(0, 20, (1, 4)))
    assert set(seen.records[0]) == {"step", "signal_gain/largest", "signal_gain/mean", "signal_gain/last"}
    with pytest.raises(ValueError, match="nothing to watch"):
        jpmhc.diagnose.watch(nn.Linear(2, 2))
    with pytest.raises(ValueError, match="every must be a whole number"):
        jpmhc.diagnose.watch(model, every=0)


def test_what_cannot_be_watched_is_one_sentence():
    with pytest.raises(ValueError, match=r"the model must be a torch\.nn\.Module, got int"):
        jpmhc.diagnose.watch(3)
    with pytest.raises(ValueError, match="log must be a function of the step and the numbers, got 3"):
        jpmhc.diagnose.watch(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), log=3)


def test_alarms_are_given_once_and_name_the_step():
    blocks = [jpmhc.HyperConnection(nn.Linear(8, 8), 8, mixer="unconstrained", index=k) for k in range(3)]
    model = jpmhc.HyperConnectionStack(blocks, expand=True, reduce=True)
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    with (
        warnings.catch_warnings(record=True) as warned,
        jpmhc.diagnose.watch(model, every=1, log=lambda step, numbers: None) as seen,
    ):
        for step in range(4):
            if step == 2:
                with torch.no_grad():
                    blocks[0].map.bias[-16:] += 11.5 * torch.eye(4).flatten()
            model(torch.randn(5, 8)).square().mean().backward()
            optimizer.step()
    assert seen.alarms["skips/direct_path"][0] == 3
    said = [str(one.message) for one in warned if "streams' mean" in str(one.message)]
    assert said == ["step 3: the skips stretch the streams' mean: their product multiplies it by 12.5"]


@pytest.mark.parametrize("mixer", sorted(jpmhc.MIXERS.keys() - {"grassmann"}))  # a projector forgets by design
def test_a_fresh_model_raises_no_alarm(mixer):
    blocks = [jpmhc.HyperConnection(nn.Linear(8, 8), 8, mixer=mixer, index=k) for k in range(24)]
    model = jpmhc.HyperConnectionStack(blocks, expand=True, reduce=True)
    with jpmhc.diagnose.watch(model, log=lambda step, numbers: None) as seen:
        model(torch.randn(5, 8))
    assert len(seen.records) == 1
    assert not seen.alarms


def test_watching_a_compiled_model_compiles_the_model_alone():
    torch.manual_seed(0)
    model = StreamNet(mixer="sinkhorn")
    traces = []

    def keep(graph, inputs):
        traces.extend(node.meta.get("stack_trace") or "" for node in graph.graph.nodes)
        return graph.forward

    with jpmhc.diagnose.watch(model, log=lambda step, numbers: None) as seen:
        torch.compile(model, backend=keep)(torch.randn(5, 12))
    assert len(seen.records) == 1
    assert any(jpmhc.connections.__path__[0] in trace for trace in traces)
    assert not any(measure_streams.__code__.co_filename in trace for trace in traces)


def test_an_optimizer_that_was_made_before_wrapping_is_a_warning():
    torch.manual_seed(0)
    model = nn.TransformerEncoder(
        nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), 2, enable_nested_tensor=False
    )
    early, x = torch.optim.SGD(model.parameters(), 0.1), torch.randn(2, 3, 16)
    jpmhc.wrap(model, inputs=x)

    def count_warnings(*optimizers):
        with (
            warnings.catch_warnings(record=True) as warned,
            jpmhc.diagnose.watch(model, log=lambda step, numbers: None),
        ):
            for _ in range(4):
                model(x).square().mean().backward()
                for optimizer in optimizers:
                    optimizer.step()
        return sum("the optimizer does not have the weights of the hyper-conn" in str(one.message) for one in warned)

    weights = [parameter for name, parameter in model.named_parameters() if "hyper_connections" in name]
    assert count_warnings(early) == 1
    assert count_warnings(early, torch.optim.SGD(weights, 0.1)) == 0
    assert count_warnings(torch.optim.SGD(model.parameters(), 0.1)) == 0
