"""Text as tokens: which files are taken, how they are split, and that no token is read twice."""

import json

import numpy as np
import pytest
import torch

from jpmhc.experiments.tasks.language import (
    Tokens,
    cut_rows,
    draw_rows,
    prepare_tokens,
    read_files,
    read_tokens,
    refuse_second_reading,
)
from tests.experiments.text_files import make_token_folder, write_files

tokenizers = pytest.importorskip("tokenizers", reason="tokenizers is not installed")


def decode(tokens: Tokens, folder) -> list[str]:
    """The files of both sides, whose first token is 0."""
    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    files = []
    for side in (tokens.training, tokens.validation):
        for part in np.split(side.numpy(), np.flatnonzero(side.numpy() == 0))[1:]:
            files.append(tokenizer.decode(part[1:].tolist()))
    return files


def test_every_file_is_whole_on_one_side_and_doubles_are_dropped(tmp_path):
    write_files(tmp_path)
    (tmp_path / "double.py").write_bytes((tmp_path / "m000.py").read_bytes())
    (tmp_path / "short.py").write_text("x")
    (tmp_path / "latin.py").write_bytes(b"\xff" * 200)
    (tmp_path / ".hidden").mkdir()
    (tmp_path / ".hidden" / "a.py").write_text("hidden" * 40)
    texts = [text for _, text in read_files((tmp_path,), (".py",))]
    assert sorted(texts) == sorted(path.read_text() for path in tmp_path.glob("m*.py"))
    folder = make_token_folder()
    tokens = read_tokens(folder)
    assert sorted(decode(tokens, folder)) == sorted(texts)
    assert 0 < len(tokens.validation) < len(tokens.training) / 4
    assert tokens.manifest.vocabulary == 300
    assert tokens.manifest.training == len(tokens.training)


def test_the_same_text_is_encoded_once(tmp_path):
    write_files(tmp_path)
    folder = prepare_tokens((tmp_path,), tmp_path / "cache", vocabulary=300)
    (folder / "training.xz").unlink()
    assert prepare_tokens((tmp_path,), tmp_path / "cache", vocabulary=300) == folder
    assert not (folder / "training.xz").exists()
    assert (
        read_tokens(make_token_folder()).manifest.fingerprint
        == json.loads((folder / "tokens.json").read_text())["fingerprint"]
    )  # the same text in another folder
    assert prepare_tokens((folder,)) == folder
    (tmp_path / "m000.py").write_text("another text " * 20)
    assert prepare_tokens((tmp_path,), tmp_path / "cache", vocabulary=300) != folder


def test_damaged_tokens_are_refused(tmp_path):
    write_files(tmp_path)
    folder = prepare_tokens((tmp_path,), tmp_path / "cache", vocabulary=300)
    (folder / "training.xz").write_bytes((folder / "validation.xz").read_bytes())
    with pytest.raises(ValueError, match="does not hold the tokens of its manifest"):
        read_tokens(folder)
    (folder / "tokens.json").write_text("{")
    with pytest.raises(ValueError, match=r"tokens\.json is not a JSON file"):
        read_tokens(folder)


def test_rows_of_one_epoch_are_all_different():
    rows = draw_rows(50, 50, 8, seed=3)
    assert sorted(rows.tolist()) == [8 * k for k in range(50)]
    assert torch.equal(draw_rows(50, 20, 8, seed=3), rows[:20])  # a longer run begins with the same rows
    assert not torch.equal(draw_rows(50, 50, 8, seed=4), rows)
    both = draw_rows(50, 100, 8, seed=3)
    assert torch.equal(both[:50], rows)
    assert sorted(both[50:].tolist()) == sorted(rows.tolist())
    assert not torch.equal(both[50:], rows)


def test_labels_are_the_tokens_that_follow():
    tokens = torch.arange(100, dtype=torch.int16)
    inputs, labels = cut_rows(tokens, torch.tensor([0, 7]), 10)
    assert inputs[1].tolist() == list(range(7, 17))
    assert labels[1].tolist() == list(range(8, 18))
    assert inputs.dtype == torch.int64


def test_validation_rows_do_not_overlap():
    tokens = read_tokens(make_token_folder())
    starts = tokens.validation_rows(4, 16)
    assert len(starts) == 4
    assert int(starts.diff().min()) >= 16
    assert len(tokens.validation_rows(10**6, 16)) == (len(tokens.validation) - 1) // 16


def test_a_second_reading_is_refused_with_the_numbers():
    refuse_second_reading(100, 10, 10, 8, 1)
    refuse_second_reading(100, 15, 10, 8, 2)
    with pytest.raises(ValueError, match=r"15 steps of 10 rows need 150 rows of 8 tokens, and the text has 100, so "):
        refuse_second_reading(100, 15, 10, 8, 1)
    with pytest.raises(ValueError, match=r"--epochs 3 allows this"):
        refuse_second_reading(100, 25, 10, 8, 1)


def test_a_few_files_are_split_whatever_their_hashes(tmp_path):
    for number in range(3):
        (tmp_path / f"{number}.txt").write_text(f"the text number {number} of three, which are all different. " * 20)
    tokens = read_tokens(prepare_tokens((tmp_path,), tmp_path / "cache"))
    assert 0 < len(tokens.validation) < len(tokens.training)


def test_text_that_cannot_be_used_is_refused(tmp_path):
    with pytest.raises(ValueError, match="need two different files of text at least, and there are 0"):
        prepare_tokens((tmp_path,))
    with pytest.raises(ValueError, match="none is no folder"):
        prepare_tokens((tmp_path / "none",))
    with pytest.raises(ValueError, match="vocabulary must"):
        prepare_tokens((tmp_path,), vocabulary=2**16)
