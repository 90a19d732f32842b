"""Checkpoints: whole or refused by name, pruned, and the model they hold."""

import json

import pytest
import torch
from small_run import SMALL, small, trained

from jpmhc.training import checkpoint


def test_a_checkpoint_holds_the_model_that_was_evaluated(tmp_path):
    trainer = trained(small(tmp_path))
    model, found = checkpoint.load_model(tmp_path)
    assert found.step == SMALL.steps
    assert found.config.model == SMALL.model
    rows = trainer.task.test_examples(torch.arange(5).numpy())
    expected = trainer.state.snapshot().predict(rows.inputs, rows.identifiers)
    ours = model.predict(rows.inputs, rows.identifiers)
    assert torch.equal(ours.logits, expected.logits)
    plain, _ = checkpoint.load_model(tmp_path, ema=False)
    assert torch.equal(plain.core.tokens, trainer.state.core.tokens)
    assert not torch.equal(plain.core.tokens, model.core.tokens)


def test_old_checkpoints_are_pruned_and_no_unfinished_folder_stays(tmp_path):
    trained(small(tmp_path, checkpoint_every=1, keep=2))
    names = sorted(p.name for p in (tmp_path / "checkpoints").iterdir())
    assert names == [f"step-{SMALL.steps - 1:08d}", f"step-{SMALL.steps:08d}"]


@pytest.mark.parametrize("file", ["shared.pt", "rank-0.pt"])
def test_a_truncated_file_is_named_and_the_older_checkpoint_is_used_only_when_asked(tmp_path, file):
    trained(small(tmp_path, checkpoint_every=2))
    older, newest = checkpoint.folders(tmp_path)
    torn = newest / file
    size = torn.stat().st_size
    torn.write_bytes(torn.read_bytes()[: size // 2])
    with pytest.raises(ValueError, match=rf"{newest.name} is damaged: {file} has {size // 2} of {size} bytes.*intact"):
        checkpoint.find(tmp_path, "latest")
    with pytest.raises(ValueError, match="damaged"):
        checkpoint.load_model(tmp_path)
    assert checkpoint.find(tmp_path, "intact").path == older


def test_a_changed_byte_is_noticed(tmp_path):
    trained(small(tmp_path))
    (path,) = checkpoint.folders(tmp_path)
    content = bytearray((path / "shared.pt").read_bytes())
    content[len(content) // 2] ^= 1
    (path / "shared.pt").write_bytes(content)
    with pytest.raises(ValueError, match="do not match its checksum"):
        checkpoint.verify(path)
    with pytest.raises(ValueError, match="no checkpoint is intact"):
        checkpoint.find(tmp_path, "intact")


def test_foreign_folders_are_refused_by_name(tmp_path):
    with pytest.raises(ValueError, match="no checkpoint at"):
        checkpoint.verify(tmp_path / "nowhere")
    with pytest.raises(ValueError, match="not a checkpoint of jpmhc"):
        checkpoint.verify(tmp_path)
    (tmp_path / "manifest.json").write_text("{")
    with pytest.raises(ValueError, match="not valid JSON"):
        checkpoint.verify(tmp_path)
    (tmp_path / "manifest.json").write_text(json.dumps({"format": "something else"}))
    with pytest.raises(ValueError, match="something else"):
        checkpoint.verify(tmp_path)
    with pytest.raises(ValueError, match="no checkpoint in"):
        checkpoint.find(tmp_path, "latest")
