"""Training the ARC decoder: it learns, it goes on to the same bits, and it refuses what does not fit."""

import dataclasses
import json
import os
import signal
from pathlib import Path

import numpy as np
import pytest
import torch

from jpmhc.experiments.comparison.arc_decoder import ArcDecoderExperiment
from jpmhc.experiments.comparison.comparison import Comparison, compare
from jpmhc.experiments.evaluation.checkpoints import EvaluateConfig
from jpmhc.experiments.evaluation.decoding import evaluate_decoder, find_decoder
from jpmhc.experiments.models.arc_decoder import ArcDecoderConfig
from jpmhc.experiments.tasks.arc import ArcConfig
from jpmhc.experiments.training.arc_decoder import CHECKPOINT, Progress, Training, load_decoder, read_checkpoint
from jpmhc.experiments.training.arc_loop import train_decoder
from jpmhc.experiments.training.config import ArcDecoderRun
from jpmhc.report.comparison import format_table
from jpmhc.report.run_record import read_run

RULES = {"copy": lambda grid: grid, "mirror": lambda grid: grid[:, ::-1], "first": lambda grid: grid[:1, :1]}


def write_puzzles(folder: Path, prefix: str, seed: int) -> Path:
    """Write a puzzle for every rule, on grids of 2 × 2 cells in four colours."""
    rng = np.random.default_rng(seed)
    folder.mkdir()
    for name, rule in RULES.items():
        grids = rng.integers(1, 5, (9, 2, 2))
        pairs = [{"input": grid.tolist(), "output": rule(grid).tolist()} for grid in grids]
        (folder / f"{prefix}{name}.json").write_text(json.dumps({"train": pairs[:8], "test": pairs[8:]}))
    return folder


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> ArcConfig:
    folder = tmp_path_factory.mktemp("arc")
    training, evaluation = write_puzzles(folder / "training", "t", 0), write_puzzles(folder / "evaluation", "e", 1)
    return ArcConfig("none", training, evaluation, augmentations=31, keep_answer_colours=True)


def make_run(task: ArcConfig, **settings: object) -> ArcDecoderRun:
    model = ArcDecoderConfig(dim=32, layers=2, heads=2, inner=64, dropout=0.0)
    small = {
        "lr": 0.01,
        "other_lr": 3e-3,
        "tokens": 256,
        "epochs": 2,
        "evaluate_variants": 8,
        "slots": 16,
        "threads": 1,
    }
    return ArcDecoderRun(**{"task": task, "model": model, "log_every": 5, **small, **settings})


def never() -> bool:
    return False


def test_it_solves_the_tests_of_simple_puzzles(task: ArcConfig, tmp_path: Path) -> None:
    outcome = train_decoder(make_run(task, epochs=70, tokens=512, predict_inputs=False, out=tmp_path))
    assert outcome.finished
    assert outcome.score is not None
    assert outcome.score.metrics["pass@2"] == 1
    assert outcome.score.metrics["lm_loss"] < 0.3
    assert outcome.score.answers == 3 * 8
    records = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert {record["kind"] for record in records} == {"start", "train", "evaluate"}
    assert json.loads((tmp_path / "score.json").read_text())["metrics"]["pass@2"] == 1
    answers = json.loads((tmp_path / "submissions" / "score.json").read_text())
    for name in RULES:
        truth = json.loads((task.evaluation_tasks / f"e{name}.json").read_text())["test"][0]["output"]
        assert truth in answers[f"e{name}"][0].values()
    assert len(read_run(tmp_path).answered) == 3


@pytest.mark.parametrize("stop_after", [1, 7])
def test_a_stopped_run_goes_on_to_the_same_bits(task: ArcConfig, tmp_path: Path, stop_after: int) -> None:
    """With dropout, streams and both optimisers; stopped in the middle of an epoch and of the next."""
    model = ArcDecoderConfig(dim=32, layers=1, heads=2, inner=32, dropout=0.2, streams=2, mixer="cayley")
    run, device = make_run(task, model=model), torch.device("cpu")
    arc = task.build()
    whole = Training(run, arc, device)
    whole.train(never, lambda progress: None)
    first = Training(run, arc, device)
    first.train(lambda: first.step == stop_after, lambda progress: None)
    first.save(tmp_path / CHECKPOINT)
    torch.manual_seed(12345)
    second = Training(run, arc, device)
    second.load(tmp_path / CHECKPOINT)
    assert second.step == stop_after
    second.train(never, lambda progress: None)
    assert second.step == whole.step > stop_after
    for name, tensor in whole.model.state_dict().items():
        assert torch.equal(tensor, second.model.state_dict()[name]), name
    assert whole.curves["loss"] == second.curves["loss"]


def test_a_signal_saves_and_the_same_command_goes_on(task: ArcConfig, tmp_path: Path) -> None:
    run = make_run(task, out=tmp_path / "run", log_every=1)
    step = Training._take_step
    steps = 0

    def interrupted(self, pack):
        nonlocal steps
        steps += 1
        if steps == 3:
            os.kill(os.getpid(), signal.SIGTERM)
        return step(self, pack)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Training, "_take_step", interrupted)
        outcome = train_decoder(run)
    assert (outcome.step, outcome.finished, outcome.stopped, outcome.score) == (3, False, signal.SIGTERM, None)
    with pytest.raises(ValueError, match=r"already holds a decoder|holds config\.json"):
        train_decoder(run)
    resumed = train_decoder(dataclasses.replace(run, resume=True))
    assert resumed.finished
    alone = train_decoder(dataclasses.replace(run, out=tmp_path / "alone"))
    there, here = (read_checkpoint(tmp_path / name / CHECKPOINT)["model"] for name in ("run", "alone"))
    assert all(torch.equal(there[name], here[name]) for name in there)
    assert alone.score is not None
    assert resumed.score is not None
    assert alone.score.metrics == resumed.score.metrics


def test_time_that_is_over_ends_a_run_before_its_next_step(task: ArcConfig, tmp_path: Path) -> None:
    outcome = train_decoder(make_run(task, out=tmp_path, minutes=1e-9))
    assert (outcome.step, outcome.finished) == (0, False)
    assert (tmp_path / CHECKPOINT).exists()


def test_a_checkpoint_of_another_run_is_refused(task: ArcConfig, tmp_path: Path) -> None:
    train_decoder(make_run(task, out=tmp_path, minutes=1e-9))
    with pytest.raises(ValueError, match="belongs to a run with other settings: epochs differ"):
        train_decoder(make_run(task, out=tmp_path, resume=True, epochs=3))
    other = dataclasses.replace(task, seed=5)
    with pytest.raises(ValueError, match="other settings: task differ"):
        train_decoder(make_run(other, out=tmp_path, resume=True))
    run, model, fingerprint = load_decoder(tmp_path / CHECKPOINT)
    assert run.task == task
    assert len(model.puzzles) == 6
    assert fingerprint == task.build().fingerprint()
    (tmp_path / "other.pt").write_bytes(b"no checkpoint")
    with pytest.raises(ValueError, match=r"other.pt cannot be read: it is not a file that torch.save writes"):
        load_decoder(tmp_path / "other.pt")
    with pytest.raises(ValueError, match="there is no checkpoint of an ARC decoder at"):
        load_decoder(tmp_path / "nothing.pt")


def test_more_variants_than_there_are_drawn_are_refused(task: ArcConfig) -> None:
    with pytest.raises(ValueError, match=r"evaluate_variants \(33\) must not exceed the variants that the task draws"):
        make_run(task, evaluate_variants=33)


def test_a_graph_is_recorded_on_a_gpu_alone(task: ArcConfig) -> None:
    with pytest.raises(ValueError, match="record=yes needs a CUDA device, not cpu"):
        Training(make_run(task, record="yes"), task.build(), torch.device("cpu"))


def test_a_run_reads_its_own_configuration(task: ArcConfig) -> None:
    run = make_run(task, minutes=3.0)
    assert ArcDecoderRun.from_json(run.to_json()) == run


def test_progress_is_shown(task: ArcConfig) -> None:
    shown: list[Progress] = []
    training = Training(make_run(task), task.build(), torch.device("cpu"))
    training.train(never, shown.append)
    assert shown[0].step == 1
    assert shown[-1].share == 1
    assert all(progress.tokens_per_second for progress in shown)
    assert training.curves["epoch"] == [1, 2]


def test_a_comparison_trains_arms_and_keeps_their_scores(task: ArcConfig, tmp_path: Path) -> None:
    experiment = ArcDecoderExperiment(make_run(task, epochs=1))
    arms = ("plain", "cayley:streams=2", "plain:epochs=2")
    comparison = Comparison(experiment, arms, seeds=(0, 1), device="cpu", out=tmp_path)
    result = compare(comparison)
    assert [entry["arm"] for entry in result["summary"]] == list(arms)
    losses = [run["final"]["loss"] for run in result["runs"]]
    assert len(set(losses)) == 6
    assert {"pass@1", "pass@2", "gradient_norm"} <= set(result["runs"][0]["final"])
    names = {path.name for path in (tmp_path / "scores").iterdir()}
    assert len(names) == 6
    assert "plain-lr-0.01-seed-1.json" in names
    assert (tmp_path / "submissions" / "plain-lr-0.01-seed-1.votes.json").exists()
    table = format_table(result)
    assert "pass@2" in table
    with pytest.raises(ValueError, match="has no option colour"):
        experiment.check(["cayley:colour=2"])


def test_a_decoder_is_evaluated_again_with_other_variants(task: ArcConfig, tmp_path: Path) -> None:
    train_decoder(make_run(task, out=tmp_path, epochs=1))
    path = find_decoder(tmp_path)
    assert path == tmp_path / CHECKPOINT == find_decoder(tmp_path / CHECKPOINT)
    assert find_decoder(tmp_path / "elsewhere") is None
    lines: list[str] = []
    again, out = evaluate_decoder(path, EvaluateConfig(runs=(tmp_path,), device="cpu"), lines.append)
    assert again.to_json()["metrics"] == json.loads((tmp_path / "score.json").read_text())["metrics"]
    few, out = evaluate_decoder(path, EvaluateConfig(runs=(tmp_path,), variants=2, device="cpu"), lines.append)
    assert few.answers == 3 * 2
    assert out == tmp_path / "score-variants-2-0.json"
    assert len(lines) == 2
    with pytest.raises(ValueError, match="has 32 variants of a puzzle, fewer than 33"):
        evaluate_decoder(path, EvaluateConfig(runs=(tmp_path,), variants=33))
    with pytest.raises(ValueError, match="whose evaluation has no option weights: leave it out"):
        evaluate_decoder(path, EvaluateConfig(runs=(tmp_path,), weights="last"))
    (task.evaluation_tasks / "etwo.json").write_text((task.evaluation_tasks / "ecopy.json").read_text())
    try:
        with pytest.raises(ValueError, match="was trained on other puzzles than its configuration gives now"):
            evaluate_decoder(path, EvaluateConfig(runs=(tmp_path,)))
    finally:
        (task.evaluation_tasks / "etwo.json").unlink()


def test_time_that_is_over_ends_the_answers(task: ArcConfig, tmp_path: Path) -> None:
    run = make_run(task, out=tmp_path, epochs=1)
    train_decoder(run)
    late = train_decoder(dataclasses.replace(run, resume=True, minutes=1e-9))
    assert late.finished
    assert late.score is None
    assert train_decoder(dataclasses.replace(run, resume=True)).score is not None


@pytest.mark.gpu
@pytest.mark.parametrize("streams", [1, 4])
def test_recorded_steps_are_steps_and_go_on_to_the_same_bits(task: ArcConfig, tmp_path: Path, streams: int) -> None:
    mixer = "cayley" if streams > 1 else "identity"
    model = ArcDecoderConfig(
        dim=64, layers=1, heads=1, inner=64, dropout=0.2, compute="bfloat16", streams=streams, mixer=mixer
    )
    device, arc = torch.device("cuda"), task.build()
    runs = {record: make_run(task, model=model, record=record) for record in ("yes", "no")}
    losses = {}
    for record, run in runs.items():
        training = Training(run, arc, device)
        training.train(never, lambda progress: None)
        losses[record] = training.curves["loss"]
    assert losses["yes"] == pytest.approx(losses["no"], rel=0.1)  # their dropout differs
    whole = Training(runs["yes"], arc, device)
    whole.train(never, lambda progress: None)
    first = Training(runs["yes"], arc, device)
    first.train(lambda: first.step == 3, lambda progress: None)
    first.save(tmp_path / CHECKPOINT)
    second = Training(runs["yes"], arc, device)
    second.load(tmp_path / CHECKPOINT)
    second.train(never, lambda progress: None)
    for name, tensor in whole.model.state_dict().items():
        assert torch.equal(tensor, second.model.state_dict()[name]), name
