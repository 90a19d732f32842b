"""Files of results: refused early, and without traces."""

import pytest

from jpmhc.experiments.training.result_files import require_writable, write_result


def test_asking_leaves_nothing_behind(tmp_path):
    path = tmp_path / "new" / "folder" / "result.json"
    require_writable(path)
    assert not list(tmp_path.iterdir())
    write_result(path, "{}")
    require_writable(path)
    assert path.read_text() == "{}"


def test_places_that_cannot_be_written_to_are_refused(tmp_path):
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file" / "result.json", tmp_path):
        with pytest.raises(ValueError, match=r"cannot write to .*: name another --out"):
            require_writable(path)
