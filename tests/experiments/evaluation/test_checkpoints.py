"""A tiny ARC run, learned by heart, then evaluated and answered apart from training through the command line."""

import dataclasses
import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from matplotlib import image

from jpmhc import cli
from jpmhc.experiments.evaluation.checkpoints import EvaluateConfig, evaluate_checkpoints, greedy_answers
from jpmhc.experiments.evaluation.votes import AnsweredTest, Candidate
from jpmhc.experiments.models.losses import PAD
from jpmhc.experiments.models.recursive import RecursiveConfig, RecursiveModel
from jpmhc.experiments.tasks.arc import Arc, ArcConfig
from jpmhc.experiments.tasks.sudoku import SudokuConfig
from jpmhc.experiments.training.checkpoint import load_model, locate_checkpoint, write_manifest
from jpmhc.experiments.training.config import TrainConfig
from jpmhc.experiments.training.loop import train
from jpmhc.report.run_record import read_run
from tests.cli.running import closed_pipe
from tests.full_disk import full_disk

TASKS = ("d037b0a7", "25d8a9c8")  # grids of 3 × 3

TINY = RecursiveConfig(
    dim=32, heads=2, inner_multiple=32, puzzle_slots=1, h_cycles=1, l_cycles=2, halt_max_steps=2, compute="float32"
)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two puzzles in three variants each, trained until they are known."""
    out = tmp_path_factory.mktemp("tiny")
    # Nothing is translated: what is learned by heart is known in its place alone, and tests stand in the corner.
    arc = ArcConfig(tasks=TASKS, test_on="training", augmentations=2, side=4, translate=False)
    config = TrainConfig(
        task=arc,
        model=TINY,
        steps=300,
        batch=24,
        lr=5e-3,
        warmup=20,
        clip=1.0,
        weight_decay=0.0,
        puzzle_lr=5e-2,
        puzzle_weight_decay=0.0,
        ema=0.9,
        device="cpu",
        checkpoint_every=200,
        out=out,
    )
    outcome = train(config)
    assert outcome.metrics["pass@1"] == 1
    return out


def test_training_learns_the_puzzles_by_heart(run: Path) -> None:
    checkpoint = locate_checkpoint(run)
    model = load_model(checkpoint)
    task = checkpoint.config.task.build()
    rows = task.examples(np.arange(10 * task.epoch_length))  # every pair of every variant, most likely
    answers = greedy_answers(model)(rows)
    exact = ((answers.tokens == rows.labels) | (rows.labels == PAD)).all(-1)
    assert exact.double().mean() >= 0.95


def test_evaluate_votes_them_right(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "new" / "evaluation.json"
    cli.main(["evaluate", str(run), "--out", str(out), "--batch", "4", "--device", "cpu"])
    said = capsys.readouterr().out
    assert "tests seen in training: 6 rows: exact accuracy 100.00 %" in said
    assert said.splitlines()[0].endswith("pass@1 100.00 %, pass@2 100.00 %")  # three votes have no fifth attempt
    assert f"wrote {out}" in said
    found = json.loads(out.read_text())
    [result] = found["results"]
    assert result["step"] == 300
    assert result["metrics"]["rows"] == 6
    assert result["metrics"]["pass@1"] == result["metrics"]["exact_accuracy"] == 1
    assert set(result["metrics"]["per_task"]) == set(TASKS)
    assert found["pooled"] is None


def test_checkpoints_are_pooled_only_when_asked(run: Path, tmp_path: Path) -> None:
    folders = tuple(run / "checkpoints" / f"step-{step:08d}" for step in (200, 300))
    config = EvaluateConfig(runs=folders, pool=True, device="cpu", out=tmp_path / "pooled.json")
    found = evaluate_checkpoints(config)
    assert [result["step"] for result in found["results"]] == [200, 300]
    assert found["results"][0]["metrics"]["pooled"] == 1
    assert found["pooled"]["pooled"] == 2
    assert all(t["votes"] == 6 for tests in found["pooled"]["per_task"].values() for t in tests)


def test_predict_writes_submission_and_picture(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "submission.json"
    cli.main(["predict", str(run), "--tasks", TASKS[0], "--out", str(out), "--device", "cpu"])
    assert str(out) in capsys.readouterr().out
    found = json.loads(out.read_text())
    puzzle = next(p for p in ArcConfig(augmentations=0).build().puzzles if p.name == TASKS[0])
    truth = puzzle.tests[0].output
    assert truth is not None
    assert list(found) == [TASKS[0]]
    assert set(found[TASKS[0]][0]) == {"attempt_1", "attempt_2"}
    assert found[TASKS[0]][0]["attempt_1"] == truth.tolist()
    assert image.imread(out.with_suffix(".png")).shape[0] > 200


def test_files_are_named_after_step_and_choices_and_lie_in_the_run(
    run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """No evaluation overwrites another one's results."""
    monkeypatch.chdir(tmp_path)
    step = run / "checkpoints" / "step-00000200"
    for words in (
        ["evaluate", str(run)],
        ["evaluate", str(step)],
        ["evaluate", str(run), "--variants", "2"],
        ["evaluate", str(run), "--variants", "2", "--sample-seed", "1"],
        ["evaluate", str(run), "--tries", "2"],
        ["evaluate", str(run), "--weights", "last"],
        ["evaluate", str(run), "--test-on", "training"],
        ["predict", str(run)],
        ["predict", str(run), "--tasks", TASKS[1], TASKS[1]],
    ):
        cli.main([*words, "--device", "cpu"])
    said = capsys.readouterr().out.splitlines()
    assert [line.split(" with ")[1] for line in said if " with " in line] == ["2 answers", "1 answer"]
    written = [Path(line.split()[1]) for line in said if line.startswith("wrote ")]
    assert [str(path.relative_to(run)) for path in written] == [
        "evaluations/step-00000300.json",
        "evaluations/step-00000200.json",
        "evaluations/step-00000300-variants-2-0.json",
        "evaluations/step-00000300-variants-2-1.json",
        "evaluations/step-00000300-tries-2-0.3.json",
        "evaluations/step-00000300-last-weights.json",
        "evaluations/step-00000300-training-tasks.json",
        "submissions/step-00000300.json",
        "submissions/step-00000300.votes.json",
        f"submissions/step-00000300-{TASKS[1]}.json",
        f"submissions/step-00000300-{TASKS[1]}.votes.json",
        f"submissions/step-00000300-{TASKS[1]}.png",
    ]
    assert all(path.is_file() for path in written)
    assert json.loads(written[1].read_text())["results"][0]["step"] == 200
    assert [test.puzzle for test in read_run(run).answered] == [TASKS[1]]  # of the newest file
    assert not list(tmp_path.iterdir())


def test_a_submission_always_has_two_attempts() -> None:
    grid, other = np.array([[1]], np.uint8), np.array([[2, 3]], np.uint8)
    answered = [
        AnsweredTest("a", 0, grid, None, [Candidate(grid, 3, 5), Candidate(other, 2, 5)]),
        AnsweredTest("a", 1, grid, None, [Candidate(other, 5, 5)]),
        AnsweredTest("b", 0, grid, None, []),
    ]
    assert Arc.submission(answered) == {
        "a": [{"attempt_1": [[1]], "attempt_2": [[2, 3]]}, {"attempt_1": [[2, 3]], "attempt_2": [[2, 3]]}],
        "b": [{"attempt_1": [[0]], "attempt_2": [[0]]}],
    }


def test_two_processes_give_the_numbers_of_one(run: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", "0"]
    command += ["--standalone", "-m", "jpmhc", "evaluate", str(run), "--device", "cpu", "--batch", "1"]
    subprocess.run([*command, "--out", str(tmp_path / "two.json")], check=True, capture_output=True)
    alone = EvaluateConfig(runs=(run,), device="cpu", batch=1, out=tmp_path / "one.json")
    one, two = evaluate_checkpoints(alone), json.loads((tmp_path / "two.json").read_text())
    assert two["processes"] == 2
    assert two["results"][0]["metrics"] == json.loads((tmp_path / "one.json").read_text())["results"][0]["metrics"]
    assert one["processes"] == 1


def test_compiling_is_asked_of_the_model_when_wanted(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []
    monkeypatch.setattr(RecursiveModel, "compile_prediction", lambda model: asked.append(model))
    for compile in (False, True):
        evaluate_checkpoints(EvaluateConfig(runs=(run,), device="cpu", compile=compile, out=tmp_path / "x.json"))
        assert len(asked) == int(compile)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["evaluate"], "name at least one folder"),
        (["evaluate", "nowhere"], "no checkpoint at nowhere"),
        (["evaluate", "RUN/tensorboard"], "RUN/tensorboard is neither a checkpoint nor a run that has one"),
        (["evaluate", "RUN", "--variants", "0"], "variants must be a whole number, at least 1, got 0"),
        (["evaluate", "RUN", "--batch", "0"], "batch must be a whole number, at least 1, got 0"),
        (["evaluate", "RUN", "--tries", "0"], "tries must be a whole number, at least 1, got 0"),
        (["evaluate", "RUN", "--noise", "0.2"], "noise needs several tries, because the first try has no noise"),
        (["evaluate", "RUN", "--sample-seed", "1"], "give their number with --variants"),
        (["evaluate", "RUN", "--extra-tasks", "RUN"], "trained without extra tasks"),
        (["predict", "RUN", "--evaluation-tasks", "RUN"], "trained without evaluation tasks"),
        (["predict"], "name the folder of a run"),
        (["evaluate", "RUN", "--test-on", "evaluation"], "no evaluation puzzle to test on"),
        (
            ["predict", "RUN", "--tasks", "00576224"],
            "00576224 is not among the 2 that the run tests (25d8a9c8, d037b0a7)",
        ),
    ],
)
def test_bad_input_is_one_sentence(
    run: Path, words: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = ["--out", str(tmp_path / "x.json"), "--device", "cpu"]
    with pytest.raises(SystemExit) as stopped:
        cli.main([word.replace("RUN", str(run)) for word in words] + out)
    assert stopped.value.code == 2
    said = capsys.readouterr().err.strip().splitlines()[-1]
    assert said.startswith("jpmhc: ")
    assert message.replace("RUN", str(run)) in said
    assert not (tmp_path / "x.json").exists()


def test_a_place_that_cannot_be_written_is_refused_first(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    for out in (tmp_path, tmp_path / "file" / "x.json", Path("/proc/x.json")):  # a folder; inside a file; nowhere
        with pytest.raises(ValueError, match="cannot write to"):
            evaluate_checkpoints(EvaluateConfig(runs=(run,), device="cpu", out=out))
    assert "preparing" not in capsys.readouterr().err


def test_a_full_disk_costs_no_score(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        cli.main(["evaluate", str(run), "--device", "cpu", "--out", "/dev/full"])
    assert stopped.value.code == 2
    said = capsys.readouterr()
    assert "pass@1 100.00 %" in said.out
    assert "cannot write to /dev/full (No space left on device): name another --out" in said.err


@pytest.mark.parametrize("command", ["evaluate", "predict"])
def test_a_full_disk_leaves_the_former_result(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    words = [command, str(run), "--device", "cpu", "--out", str(tmp_path / "x.json")]
    for former in ({}, {tmp_path / "x.json": b"former"}):
        for path, content in former.items():
            path.write_bytes(content)
        with full_disk(20), pytest.raises(SystemExit):
            cli.main(words)
        assert capsys.readouterr().err.endswith("x.json (File too large): name another --out\n")
        assert {path: path.read_bytes() for path in tmp_path.iterdir()} == former
    cli.main(words)
    assert json.loads((tmp_path / "x.json").read_text())


@pytest.mark.parametrize("command", ["evaluate", "predict"])
def test_a_result_is_written_when_nobody_reads_the_output(run: Path, tmp_path: Path, command: str) -> None:
    with closed_pipe():
        cli.main([command, str(run), "--device", "cpu", "--out", str(tmp_path / "x.json")])
    assert json.loads((tmp_path / "x.json").read_text())


def test_changed_data_are_refused(run: Path, tmp_path: Path) -> None:
    manifest = run / "checkpoints" / "step-00000300" / "manifest.json"
    original = manifest.read_text()
    changed = json.loads(original)
    changed["config"]["task"]["seed"] = 5
    write_manifest(manifest.parent, changed)
    try:
        with pytest.raises(ValueError, match="trained on other data"):
            evaluate_checkpoints(EvaluateConfig(runs=(run,), device="cpu", out=tmp_path / "x.json"))
    finally:
        manifest.write_text(original)


def test_sudoku_runs_are_scored_but_not_voted_on(tmp_path: Path) -> None:
    task = SudokuConfig(puzzles=4, test_puzzles=3)
    config = TrainConfig(
        task=task, model=dataclasses.replace(TINY), steps=1, batch=4, device="cpu", out=tmp_path / "run"
    )
    train(config)
    lines: list[str] = []
    choices = EvaluateConfig(runs=(tmp_path / "run",), device="cpu", out=tmp_path / "x.json")
    found = evaluate_checkpoints(choices, lines.append)
    metrics = found["results"][0]["metrics"]
    assert metrics["rows"] == 3
    assert "pass@1" not in metrics
    [line] = lines
    assert re.search(r"step-00000001: held out: 3 rows: exact accuracy [0-9.]+ %, token accuracy .* %, lm loss", line)
    assert found["results"][0]["tests"] == "held out"
    with pytest.raises(ValueError, match="no variants to choose: in its task, no variants vote"):
        evaluate_checkpoints(EvaluateConfig(runs=(tmp_path / "run",), variants=2, device="cpu"))
    with pytest.raises(ValueError, match="an evaluation on this task cannot choose test-on: leave it out"):
        evaluate_checkpoints(dataclasses.replace(choices, task_options={"test_on": "training"}))
    with pytest.raises(ValueError, match="several checkpoints need a file for their results"):
        evaluate_checkpoints(EvaluateConfig(runs=(tmp_path / "run", tmp_path / "run"), device="cpu"))
    with pytest.raises(ValueError, match="evaluate_variants is for tasks whose variants vote; sudoku has none"):
        dataclasses.replace(config, evaluate_variants=2)
    with pytest.raises(ValueError, match="no votes to pool"):
        evaluate_checkpoints(EvaluateConfig(runs=(tmp_path / "run",), pool=True, device="cpu", out=tmp_path / "x.json"))
    with pytest.raises(SystemExit):
        cli.main(["predict", str(tmp_path / "run"), "--device", "cpu", "--out", str(tmp_path / "s.json")])
    assert not (tmp_path / "s.json").exists()
