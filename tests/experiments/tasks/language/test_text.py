"""Text from source files: what is split, how windows are cut, and that the same seed gives the same bytes."""

import pytest
import torch

from jpmhc.experiments.tasks.language.text import cut_windows, read_library, read_sources


@pytest.fixture
def sources(tmp_path):
    """Forty files of sixty bytes each, and some that are left out."""
    for k in range(40):
        (tmp_path / f"m{k:02}.py").write_bytes(b"%02d" % k * 30)
    (tmp_path / "test").mkdir()
    (tmp_path / "test" / "a.py").write_bytes(b"~" * 50)
    (tmp_path / "notes.txt").write_bytes(b"~" * 50)
    return tmp_path


def test_every_file_is_whole_on_one_side(sources):
    text = read_sources(sources)
    sides = [bytes(side.numpy()).split(b"\0")[:-1] for side in (text.training, text.validation)]
    assert sorted(sides[0] + sides[1]) == [b"%02d" % k * 30 for k in range(40)]
    assert 0 < len(sides[1]) < 12
    assert read_sources(sources).fingerprint == text.fingerprint
    (sources / "m00.py").write_bytes(b"other")
    assert read_sources(sources).fingerprint != text.fingerprint


def test_labels_are_the_bytes_that_follow(sources):
    training = read_sources(sources).training
    inputs, labels = cut_windows(training, torch.tensor([0, 7]), 10)
    assert inputs[1].tolist() == training[7:17].tolist()
    assert labels[1].tolist() == training[8:18].tolist()


def test_draws_depend_on_seed_and_step_alone(sources):
    text = read_sources(sources)
    starts = text.draw_starts(3, 6, 5, 16)
    assert torch.equal(text.draw_starts(3, 4, 5, 16), starts[:4])
    assert not torch.equal(text.draw_starts(4, 6, 5, 16), starts)
    assert int(starts.min()) >= 0
    assert int(starts.max()) < len(text.training) - 16


def test_validation_windows_do_not_overlap(sources):
    text = read_sources(sources)
    starts = text.list_validation_starts(4, 16)
    assert len(starts) == 4
    assert int(starts.diff().min()) >= 16
    assert int(starts[-1]) + 16 < len(text.validation)
    assert len(text.list_validation_starts(10**6, 16)) == (len(text.validation) - 1) // 16


def test_the_library_has_megabytes():
    text = read_library()
    assert len(text.training) > 3e6
    assert 0.02 < len(text.validation) / len(text.training) < 0.25


def test_too_few_files_are_refused(tmp_path):
    with pytest.raises(ValueError, match="too few Python files"):
        read_sources(tmp_path)
