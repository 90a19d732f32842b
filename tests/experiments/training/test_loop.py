"""The loop: resuming to the bit after a kill, stopping on SIGTERM and NaN, accumulation, frames and puzzle vectors."""

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from jpmhc.experiments.evaluation.checkpoints import EvaluateConfig, evaluate_checkpoints
from jpmhc.experiments.tasks.arc import ArcConfig
from jpmhc.experiments.training import checkpoint
from jpmhc.experiments.training.learner import Learner, NonFiniteLoss
from jpmhc.experiments.training.loop import train
from jpmhc.manifolds import grassmann
from tests.experiments.training.small_run import losses, small, trained

MIXED = {"mixer": "grassmann", "streams": 2, "mixer_dynamic": False}


def test_killed_run_resumes_to_the_bit(tmp_path):
    """kill -9 at an arbitrary step; the resumed run's losses and weights equal the uninterrupted run's."""
    steps = 400
    config = small(tmp_path / "killed", steps=steps, checkpoint_every=5, model=MIXED)
    script = f"""
import sys, torch; torch.set_num_threads(1); sys.path.insert(0, {str(Path(__file__).parents[3])!r})
from pathlib import Path
from tests.experiments.training.small_run import small
from jpmhc.experiments.evaluation.checkpoints import EvaluateConfig, evaluate_checkpoints
from jpmhc.experiments.training.loop import train
train(small(Path({str(config.out)!r}), steps={steps}, checkpoint_every=5, model={MIXED!r}))
"""
    process = subprocess.Popen([sys.executable, "-c", script], stderr=subprocess.DEVNULL)
    while not (config.out / "log.jsonl").exists() or len(losses_so_far(config.out)) < 13:
        assert process.poll() is None, "the run ended before it could be killed"
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    found = checkpoint.choose_checkpoint(config.out, "latest")
    end = found.step + 12
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        resumed = trained(small(config.out, steps=end, model=MIXED), found)
        whole = trained(small(tmp_path / "whole", steps=end, model=MIXED))
    finally:
        torch.set_num_threads(threads)
    assert 0 < found.step < steps
    assert losses(config.out) == losses(tmp_path / "whole")
    for (name, p), q in zip(resumed.learner.model.named_parameters(), whole.learner.model.parameters()):
        assert torch.equal(p, q), name
    for p, q in zip(resumed.learner.averages, whole.learner.averages):
        assert torch.equal(p, q)


def losses_so_far(folder):
    return [line for line in (folder / "log.jsonl").read_text().splitlines() if '"train"' in line]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_saves_first_and_the_rest_can_be_resumed(tmp_path, monkeypatch, number):
    advance = Learner.take_step

    def interrupted(state, *arguments, **options):
        if state.step == 3:
            os.kill(os.getpid(), number)
        return advance(state, *arguments, **options)

    with monkeypatch.context() as patched:
        patched.setattr(Learner, "take_step", interrupted)
        outcome = train(small(tmp_path / "stopped", steps=8))
    assert outcome.stopped
    assert outcome.checkpoint.name == "step-00000005"  # the step under way is finished, the next one sees it
    resumed = train(small(tmp_path / "stopped", steps=8, resume="latest"))
    assert not resumed.stopped
    trained(small(tmp_path / "whole", steps=8))
    assert losses(tmp_path / "stopped") == losses(tmp_path / "whole")


def test_a_signal_ends_the_compilation_at_once(tmp_path, monkeypatch, capsys):
    """In the place of a compiler that takes minutes: a first step that would never end."""

    def compiling(*arguments, **options):
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(600)

    with monkeypatch.context() as patched:
        patched.setattr(Learner, "take_step", compiling)
        patched.setattr(torch.nn.Module, "compile", lambda core: None)
        outcome = train(small(tmp_path / "run", compile=True))
    assert "compiling the step" in capsys.readouterr().err
    assert (outcome.stopped, outcome.step, outcome.checkpoint) == (signal.SIGTERM, 0, None)
    assert train(small(tmp_path / "run")).step == 4  # the folder is free


def test_streams_that_nothing_mixes_are_mentioned(tmp_path, capsys):
    train(small(tmp_path / "run", steps=1, model={"streams": 2}))
    assert "2 streams and the mixer identity: sublayers read and write" in capsys.readouterr().err


def test_ctrl_c_twice_ends_at_once(tmp_path, monkeypatch):
    def interrupted(*arguments, **options):
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(Learner, "take_step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        train(small(tmp_path))
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def evaluations(folder):
    records = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    return [r for r in records if r["kind"] == "evaluate"]


@pytest.mark.parametrize(("ending", "every"), [(signal.SIGTERM, 0), (signal.SIGKILL, 2)])
def test_an_evaluation_that_is_ended_loses_no_step_and_is_made_up_for(tmp_path, ending, every):
    """The checkpoint is there before the evaluation begins, and SIGTERM does not wait for its end."""
    out, answering = tmp_path / "ended", tmp_path / "answering"
    options = {"steps": 3, "checkpoint_every": 100, "evaluate_every": every}
    script = f"""
import sys, time, torch; torch.set_num_threads(1); sys.path.insert(0, {str(Path(__file__).parents[3])!r})
from pathlib import Path
from tests.experiments.training.small_run import small
from jpmhc.cli.train import run_training
from jpmhc.experiments.training import loop

def greedy_answers(model):
    def answer(batch):
        Path({str(answering)!r}).touch()
        time.sleep(600)
    return answer

loop.greedy_answers = greedy_answers
run_training(small(Path({str(out)!r}), **{options!r}))
"""
    process = subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    while not answering.exists():
        assert process.poll() is None, process.stderr.read()
        time.sleep(0.01)
    process.send_signal(ending)
    try:
        said, _ = process.communicate(timeout=20)
    finally:
        process.kill()
    done = every or 3
    found = checkpoint.choose_checkpoint(out, "latest")
    assert found.step == done
    assert not evaluations(out)
    if ending == signal.SIGTERM:
        assert process.returncode == 143
        assert f"stopped by a signal after {done} steps; checkpoint: {found.path}" in said
    resumed = train(small(out, resume="latest", **options))
    trained(small(tmp_path / "whole", **options))
    assert evaluations(out) == evaluations(tmp_path / "whole")
    assert [r["step"] for r in evaluations(out)] == ([2, 3] if every else [3])
    assert losses(out) == losses(tmp_path / "whole")
    assert resumed.metrics["exact_accuracy"] == evaluations(out)[-1]["exact_accuracy"]


def test_sigterm_while_saving_is_not_forgotten_by_the_evaluation(tmp_path, monkeypatch):
    save = Learner.save

    def interrupted(state, run):
        os.kill(os.getpid(), signal.SIGTERM)
        return save(state, run)

    monkeypatch.setattr(Learner, "save", interrupted)
    outcome = train(small(tmp_path, steps=3))
    assert outcome.stopped
    assert outcome.checkpoint.name == "step-00000003"
    assert not evaluations(tmp_path)


def test_nothing_left_to_train_is_said_and_names_the_checkpoint(tmp_path, capsys):
    trained(small(tmp_path, steps=3))
    before = evaluations(tmp_path)
    outcome = train(small(tmp_path, steps=3, resume="latest"))
    newest = tmp_path / "checkpoints" / "step-00000003"
    assert f"{newest} has done all 3 steps: nothing is left to train" in capsys.readouterr().err
    assert outcome.checkpoint == newest
    assert evaluations(tmp_path) == before  # not repeated
    with pytest.raises(ValueError, match=r"step-00000003 has done more than the 2 steps asked for: raise --steps"):
        train(small(tmp_path, steps=2, resume="latest"))


def test_a_loss_that_is_not_finite_stops_with_step_rows_and_state(tmp_path, monkeypatch):
    advance = Learner.take_step

    def poisoned(state, *arguments, **options):
        if state.step == 2:
            state.core.token_head.weight.data[3, 3] = float("nan")
        return advance(state, *arguments, **options)

    monkeypatch.setattr(Learner, "take_step", poisoned)
    with pytest.raises(NonFiniteLoss, match=r"loss of step 3 with mixer identity is nan, on 8 rows of .*failed"):
        train(small(tmp_path))
    saved = checkpoint.verify_checkpoint(tmp_path / "failed" / "checkpoints" / "step-00000002")
    # The state before the step: everything but the poison is finite, and the rows in flight are there.
    weights = saved.shared()["core"]
    assert [name for name, w in weights.items() if not torch.isfinite(w).all()] == ["token_head.weight"]
    assert torch.isfinite(saved.rank(0)["carry"]["z_h"]).all()
    assert saved.rank(0)["carry"]["inputs"].shape == (8, 16)


def test_accumulated_parts_give_the_losses_of_the_whole(tmp_path):
    trained(small(tmp_path / "whole", steps=6))
    trained(small(tmp_path / "parts", steps=6, accumulate=4))
    whole, parts = losses(tmp_path / "whole"), losses(tmp_path / "parts")
    assert parts == pytest.approx(whole, abs=2e-6)


def test_frames_stay_orthonormal_and_move(tmp_path):
    trainer = trained(small(tmp_path, steps=6, model=MIXED, frame_lr=0.1, frame_adaptive=True))
    for frame in trainer.learner.frame_optimiser.param_groups[0]["params"]:
        start = grassmann.projector(torch.full((2, 1), 2**-0.5))
        assert (frame.T @ frame - torch.eye(1)).abs().max() < 1e-6
        assert (grassmann.projector(frame.detach()) - start).abs().max() > 1e-4


def test_puzzle_vectors_move_by_their_own_rate(tmp_path):
    """Row 0 is looked up at every step: after the warm-up's first step its entries are ± its learning rate."""
    trainer = trained(small(tmp_path, steps=1, warmup=0, puzzle_lr=0.25))
    moved = trainer.learner.model.puzzles.weight.detach().abs()
    assert torch.equal(moved, torch.full_like(moved, 0.25))


def test_occupied_folders_and_other_configurations_are_refused(tmp_path):
    trained(small(tmp_path))
    with pytest.raises(ValueError, match="--resume latest"):
        train(small(tmp_path))
    with pytest.raises(ValueError, match=r"model.dim 32 instead of 16"):
        train(small(tmp_path, resume="latest", model={"dim": 32}))
    with pytest.raises(ValueError, match="multiple of processes"):
        train(small(tmp_path / "new", accumulate=3))
    assert not (tmp_path / "new").exists()
    with pytest.raises(ValueError, match=r"cannot write to .*log.jsonl \(File exists\): name another --out"):
        train(small(tmp_path / "log.jsonl"))


def test_another_runs_newest_checkpoint_can_be_gone_on_from(tmp_path):
    trained(small(tmp_path / "first", steps=3))
    outcome = train(small(tmp_path / "second", steps=5, resume=str(tmp_path / "first")))
    trained(small(tmp_path / "whole", steps=5))
    assert outcome.step == 5
    assert losses(tmp_path / "second") == {s: loss for s, loss in losses(tmp_path / "whole").items() if s > 3}


def test_the_log_has_what_a_reader_needs(tmp_path):
    trained(small(tmp_path, evaluate_every=2, model={"mixer": "cayley", "streams": 2}))
    records = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert [r["step"] for r in records if r["kind"] == "evaluate"] == [2, 4]
    line = next(r for r in records if r["kind"] == "train")
    assert line["loss"] == pytest.approx(line["lm_loss"] + 0.5 * line["q_loss"])
    assert 0 < line["largest_layer_gradient_norm"] < line["gradient_norm"]
    assert line["largest_layer"].startswith(("network.", "tok"))
    assert max(line["layer_gradient_norms"].values()) == line["largest_layer_gradient_norm"]
    assert records[0]["kind"] == "start"
    assert records[0]["torch"] == torch.__version__
    mixing = next(r for r in records if r["kind"] == "mixing")
    assert len(mixing["violation"]) == 4
    assert mixing["product_singular_values"]["smallest"] == pytest.approx(1.0, abs=1e-3)
    assert (tmp_path / "config.json").exists()


def arc_folder(folder, names, *, outputs=True):
    """ARC files, each with one demonstration and one test of 2 × 2."""
    folder.mkdir()
    for name in names:
        grid = [[len(name), 1], [2, ord(name[-1]) % 10]]
        test = {"input": grid[::-1], "output": grid} if outputs else {"input": grid[::-1]}
        content = {"train": [{"input": grid, "output": grid[::-1]}], "test": [test]}
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


@pytest.mark.parametrize("every", [0, 2])
def test_training_goes_on_where_no_test_has_a_known_answer(tmp_path, capsys, every):
    task = ArcConfig(
        version="none",
        extra_tasks=arc_folder(tmp_path / "extra", ["a", "bb"]),
        evaluation_tasks=arc_folder(tmp_path / "open", ["ccc"], outputs=False),
        augmentations=2,
        side=3,
    )
    outcome = train(small(tmp_path / "run", task=task, evaluate_every=every, evaluate_variants=2))
    assert (outcome.step, outcome.metrics) == (4, {})
    assert capsys.readouterr().err.count("no test has a known answer") == 1
    assert not evaluations(tmp_path / "run")
    with pytest.raises(ValueError, match=r"no test of .* has a known answer to score: jpmhc predict"):
        evaluate_checkpoints(EvaluateConfig(runs=(tmp_path / "run",), device="cpu"))


def test_a_resumed_run_says_from_where_and_what_changed_and_keeps_the_former_configuration(tmp_path, capsys):
    trained(small(tmp_path, steps=2))
    train(small(tmp_path, steps=2, resume="latest"))
    path = tmp_path / "checkpoints" / "step-00000002"
    assert f"going on from {path}, step 2: no setting changed\n" in capsys.readouterr().err
    train(small(tmp_path, steps=3, lr=5e-4, resume="latest"))
    said = f"going on from {path}, step 2: steps 3 instead of 2, lr 0.0005 instead of 0.001\n"
    assert said in capsys.readouterr().err
    records = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    changed = [{"name": "steps", "there": 2, "here": 3}, {"name": "lr", "there": 1e-3, "here": 5e-4}]
    assert [r for r in records if r["kind"] == "resume"] == [
        {"kind": "resume", "step": 2, "checkpoint": str(path), "changes": []},
        {"kind": "resume", "step": 2, "checkpoint": str(path), "changes": changed},
    ]
    assert json.loads((tmp_path / "config-until-step-00000002.json").read_text())["lr"] == 1e-3
    assert json.loads((tmp_path / "config.json").read_text())["lr"] == 5e-4


def test_a_run_whose_tasks_moved_goes_on_and_is_evaluated_from_anywhere(tmp_path, monkeypatch):
    (tmp_path / "here").mkdir()
    (tmp_path / "there").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    arc_folder(Path("extra"), ["a", "bb"])

    def configured(place, **change):
        return small(
            tmp_path / "run",
            task=ArcConfig(version="none", extra_tasks=Path(place), test_on="training", augmentations=2, side=3),
            **change,
        )

    train(configured("extra", steps=2))
    monkeypatch.chdir(tmp_path / "there")  # the folder was named relative to another one
    choices = EvaluateConfig(runs=(tmp_path / "run",), device="cpu")
    assert evaluate_checkpoints(choices)["results"][0]["metrics"]["tasks"] == 2
    (tmp_path / "here" / "extra").rename("moved")
    assert train(configured("moved", steps=3, resume="latest")).step == 3
    arc_folder(Path("other"), ["a", "cc"])
    with pytest.raises(
        ValueError, match=r"other data \(task.extra_tasks .*other instead of .*moved\): the task's fing"
    ):
        train(configured("other", steps=4, resume="latest"))
    with pytest.raises(ValueError, match="without evaluation tasks, so it has no path to change: leave out --evaluati"):
        evaluate_checkpoints(dataclasses.replace(choices, task_options={"evaluation_tasks": Path("moved")}))


def test_an_evaluation_does_not_move_the_random_generator(tmp_path):
    """A run that is killed after an evaluation does not make it again, and must save the same state as one that did."""
    trainer = trained(small(tmp_path, steps=1))
    before = torch.get_rng_state()
    trainer.evaluate()
    assert torch.equal(torch.get_rng_state(), before)
