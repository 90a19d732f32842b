"""Checkpoints: whole or refused by name, pruned, and the model they hold."""

import dataclasses
import json
from pathlib import Path

import pytest
import torch

from jpmhc.experiments.evaluation.checkpoints import EvaluateConfig, evaluate_checkpoints
from jpmhc.experiments.training import checkpoint
from jpmhc.experiments.training.loop import train
from tests.experiments.training.small_run import SMALL, small, trained

EARLIER = Path(__file__).parent / "earlier_checkpoints"


def test_a_checkpoint_holds_the_model_that_was_evaluated(tmp_path):
    trainer = trained(small(tmp_path))
    found = checkpoint.locate_checkpoint(tmp_path)
    model = checkpoint.load_model(found)
    assert found.step == SMALL.steps
    assert found.config.model == SMALL.model
    rows = trainer.task.test_examples(torch.arange(5).numpy())
    expected = trainer.learner.snapshot().predict(rows.inputs, rows.identifiers)
    ours = model.predict(rows.inputs, rows.identifiers)
    assert torch.equal(ours.logits, expected.logits)
    plain = checkpoint.load_model(found, ema=False)
    assert torch.equal(plain.core.tokens, trainer.learner.core.tokens)
    assert not torch.equal(plain.core.tokens, model.core.tokens)


@pytest.mark.parametrize(
    ("kind", "rows", "loss", "score"),
    [
        ("plain", 3, 2.5584517522808636, 2.660320788038606),  # on ARC
        ("cayley", 4, 1.6359870265394276, 1.6938556556627524),
        ("grassmann", 4, 1.6365130562536634, 1.6940697419005653),
    ],
)
def test_a_checkpoint_of_an_earlier_version_is_scored_and_resumed(tmp_path, kind, rows, loss, score):
    """Configuration, weights, averages, optimisers and rows in flight still fit: what follows is what followed then."""
    found = checkpoint.locate_checkpoint(EARLIER / kind / "step-00000002")
    scored = evaluate_checkpoints(EvaluateConfig(runs=(found.path,), device="cpu", out=tmp_path / "score.json"))
    assert scored["results"][0]["metrics"]["rows"] == rows
    outcome = train(dataclasses.replace(found.config, out=tmp_path / "run", resume=str(found.path)))
    losses = {r["step"]: r["loss"] for r in map(json.loads, (tmp_path / "run" / "log.jsonl").open()) if "loss" in r}
    assert losses == {3: pytest.approx(loss, abs=1e-6)}
    assert outcome.metrics["lm_loss"] == pytest.approx(score, abs=1e-6)


def test_old_checkpoints_are_pruned_and_no_unfinished_folder_stays(tmp_path):
    trained(small(tmp_path, checkpoint_every=1, keep=2))
    names = sorted(p.name for p in (tmp_path / "checkpoints").iterdir())
    assert names == [f"step-{SMALL.steps - 1:08d}", f"step-{SMALL.steps:08d}"]


def tear(folder, file="shared.pt"):
    """Cut a file in half; returns its new size and the old one."""
    torn = folder / file
    size = torn.stat().st_size
    torn.write_bytes(torn.read_bytes()[: size // 2])
    return size // 2, size


@pytest.mark.parametrize("file", ["shared.pt", "rank-0.pt"])
def test_a_truncated_file_is_named_and_the_older_checkpoint_is_used_only_when_asked(tmp_path, file):
    trained(small(tmp_path, checkpoint_every=2))
    older, newest = checkpoint.list_folders(tmp_path)
    half, whole = tear(newest, file)
    fault = rf"{newest.name} is damaged: {file} has {half} of {whole} bytes"
    with pytest.raises(ValueError, match=rf"{fault}; --resume intact goes on from {older.name}"):
        checkpoint.choose_checkpoint(tmp_path, "latest")
    assert checkpoint.choose_checkpoint(tmp_path, "intact").path == older
    for named in (tmp_path, newest):  # evaluate and predict have no --resume: they are told what to name
        with pytest.raises(ValueError, match=rf"{fault}; name an intact checkpoint instead: {older}$"):
            checkpoint.locate_checkpoint(named)


@pytest.mark.parametrize("keep", [1, 2])
def test_going_on_before_a_damaged_checkpoint_sets_it_aside(tmp_path, capsys, keep):
    """The damaged one neither blocks what comes next nor takes the place of a good one."""
    trained(small(tmp_path, steps=6, checkpoint_every=2, keep=3))
    tear(checkpoint.list_folders(tmp_path)[-1])
    train(small(tmp_path, steps=5, keep=keep, resume="intact", checkpoint_every=100))
    assert "shared.pt has" in (said := capsys.readouterr().err)
    assert "step-00000006 is now step-00000006.damaged" in said
    assert [p.name for p in checkpoint.list_folders(tmp_path)] == ["step-00000004", "step-00000005"][-keep:]
    assert checkpoint.choose_checkpoint(tmp_path, "latest").step == 5
    assert checkpoint.locate_checkpoint(tmp_path).step == 5
    assert (tmp_path / "checkpoints" / "step-00000006.damaged" / "manifest.json").exists()


def test_going_on_from_an_older_checkpoint_sets_newer_ones_aside(tmp_path, capsys):
    trained(small(tmp_path, checkpoint_every=2))
    train(small(tmp_path, steps=3, keep=1, resume=str(tmp_path / "checkpoints" / "step-00000002")))
    assert "step-00000004 is now step-00000004.superseded" in capsys.readouterr().err
    assert [p.name for p in checkpoint.list_folders(tmp_path)] == ["step-00000003"]


def test_a_refused_resume_moves_nothing(tmp_path):
    trained(small(tmp_path, checkpoint_every=2))
    before = checkpoint.list_folders(tmp_path)
    tear(before[-1])
    with pytest.raises(ValueError, match="another configuration"):
        train(small(tmp_path, resume="intact", batch=4))
    assert checkpoint.list_folders(tmp_path) == before


def test_a_changed_byte_is_noticed(tmp_path):
    trained(small(tmp_path))
    (path,) = checkpoint.list_folders(tmp_path)
    content = bytearray((path / "shared.pt").read_bytes())
    content[len(content) // 2] ^= 1
    (path / "shared.pt").write_bytes(content)
    with pytest.raises(ValueError, match="do not match its checksum"):
        checkpoint.verify_checkpoint(path)
    with pytest.raises(ValueError, match="no checkpoint is intact"):
        checkpoint.choose_checkpoint(tmp_path, "intact")
    with pytest.raises(ValueError, match="no other checkpoint is intact"):
        checkpoint.choose_checkpoint(tmp_path, "latest")
    with pytest.raises(ValueError, match=r"its checksum$"):  # nothing to advise
        checkpoint.locate_checkpoint(tmp_path)


def test_foreign_folders_are_refused_by_name(tmp_path):
    with pytest.raises(ValueError, match="no checkpoint at"):
        checkpoint.verify_checkpoint(tmp_path / "nowhere")
    with pytest.raises(ValueError, match="not a checkpoint of jpmhc"):
        checkpoint.verify_checkpoint(tmp_path)
    (tmp_path / "manifest.json").write_text("{")
    with pytest.raises(ValueError, match="not a JSON file"):
        checkpoint.verify_checkpoint(tmp_path)
    (tmp_path / "manifest.json").write_text(json.dumps({"format": "something else"}))
    with pytest.raises(ValueError, match="something else"):
        checkpoint.verify_checkpoint(tmp_path)
    (tmp_path / "manifest.json").write_text(json.dumps({"format": checkpoint.FORMAT, "step": 3, "ranks": 1}))
    with pytest.raises(ValueError, match=r"manifest.json lacks its checksum"):
        checkpoint.verify_checkpoint(tmp_path)
    checkpoint.write_manifest(tmp_path, {"format": checkpoint.FORMAT, "step": 3, "ranks": 1})
    with pytest.raises(ValueError, match="lacks config, files, fingerprint"):
        checkpoint.verify_checkpoint(tmp_path)
    with pytest.raises(ValueError, match="no checkpoint in"):
        checkpoint.choose_checkpoint(tmp_path, "latest")


def test_a_checkpoint_of_another_version_is_not_called_damaged(tmp_path):
    """It is refused by name also by `intact`: setting it aside would hide a good one."""
    trained(small(tmp_path, checkpoint_every=2))
    newest = checkpoint.list_folders(tmp_path)[-1]
    changed = json.loads((newest / "manifest.json").read_text())
    changed["config"]["colour"] = "blue"
    checkpoint.write_manifest(newest, changed)
    with pytest.raises(ValueError, match=r"step-00000004 is not a checkpoint this version reads.*colour"):
        checkpoint.choose_checkpoint(tmp_path, "intact")


@pytest.mark.parametrize("content", [[], {}, None, {"format": checkpoint.FORMAT, "files": []}])
def test_a_manifest_that_says_nothing_is_damaged_and_can_be_gone_back_before(tmp_path, content):
    trained(small(tmp_path, checkpoint_every=2))
    older, newest = checkpoint.list_folders(tmp_path)
    (newest / "manifest.json").write_text(json.dumps(content))
    with pytest.raises(checkpoint.DamagedCheckpoint, match=rf"{newest} is damaged: manifest.json .*; --resume intact"):
        checkpoint.choose_checkpoint(tmp_path, "latest")
    assert checkpoint.choose_checkpoint(tmp_path, "intact").path == older


@pytest.mark.parametrize("entry", [5, {"bytes": 5}])
def test_a_manifest_without_a_files_checksum_is_damaged(tmp_path, entry):
    trained(small(tmp_path))
    (path,) = checkpoint.list_folders(tmp_path)
    manifest = json.loads((path / "manifest.json").read_text())
    manifest["files"]["shared.pt"] = entry
    checkpoint.write_manifest(path, manifest)
    with pytest.raises(checkpoint.DamagedCheckpoint, match=r"lacks the size or checksum of shared.pt"):
        checkpoint.verify_checkpoint(path)


def test_every_bit_of_a_manifest_is_covered(tmp_path):
    trained(small(tmp_path))
    (path,) = checkpoint.list_folders(tmp_path)
    file = path / "manifest.json"
    written = file.read_bytes()
    for place in range(0, 8 * len(written), 61):  # 61 and 8 have no common factor: every bit of a byte has its turn
        flipped = bytearray(written)
        flipped[place // 8] ^= 1 << place % 8
        file.write_bytes(flipped)
        with pytest.raises(checkpoint.DamagedCheckpoint, match=rf"^the checkpoint {path} is damaged: .*manifest.json"):
            checkpoint.verify_checkpoint(path)
    file.write_bytes(written)
    assert checkpoint.verify_checkpoint(path).step == 4


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"config": {"task": None}}, r"its task must be an object with fields, not None$"),
        ({"config": {"model": [1]}}, r"its model must be an object with fields, not \[1\]$"),
        ({"config": {"task": {}}}, r"no task is called None; choose one of sudoku, arc$"),
        ({"config": {"steps": "x" * 5000}}, r"steps of the saved configuration is 'x+\.\.\.x+', and must be int$"),
        (
            {"config": {"betas": [0.9]}},
            r"betas of .* is \[0\.9\], and must be tuple\[float, float\]$",
        ),
        ({"config": {"strategy": "zero9"}}, r"strategy of .* is 'zero9', and must be Literal\['ddp'"),
        ({"config": {"clip": True}}, r"clip of .* is True, and must be float \| None$"),
        ({"ranks": 0}, r"damaged: manifest.json counts 4 steps and 0 processes$"),
        ({"ranks": 2}, r"damaged: manifest.json does not list rank-1.pt$"),
        ({"step": True}, r"damaged: manifest.json lacks step$"),
    ],
)
def test_a_manifest_with_its_checksum_and_wrong_content_is_one_sentence(tmp_path, change, sentence):
    trained(small(tmp_path))
    (path,) = checkpoint.list_folders(tmp_path)
    manifest = json.loads((path / "manifest.json").read_text())
    config = {**manifest["config"], **change.get("config", {})}
    checkpoint.write_manifest(path, {**manifest, **change, "config": config})
    with pytest.raises(ValueError, match=sentence) as refused:
        checkpoint.verify_checkpoint(path)
    assert str(path) in str(refused.value)
    assert len(str(refused.value)) < len(str(path)) + 300


def test_a_checkpoint_without_its_manifest_is_answered_with_the_intact_ones(tmp_path):
    trained(small(tmp_path, checkpoint_every=2))
    older, newest = checkpoint.list_folders(tmp_path)
    (newest / "manifest.json").unlink()
    with pytest.raises(
        checkpoint.DamagedCheckpoint, match=rf"no manifest.json; name an intact checkpoint instead: {older}$"
    ):
        checkpoint.locate_checkpoint(newest)


def test_a_full_disk_is_told_with_what_can_be_gone_on_from(tmp_path, monkeypatch):
    write = checkpoint.write_part

    def full(path, name, content):
        if path.name.startswith("step-00000004"):
            raise OSError(28, "No space left on device")
        write(path, name, content)

    monkeypatch.setattr(checkpoint, "write_part", full)
    said = r"^cannot write to .* \(No space left on device\) after step 4; --resume latest goes on from step-00000002$"
    with pytest.raises(OSError, match=said):
        train(small(tmp_path, checkpoint_every=2))
    monkeypatch.undo()
    assert train(small(tmp_path, resume="latest")).step == 4
