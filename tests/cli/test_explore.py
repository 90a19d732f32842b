"""The command `jpmhc explore`: the atlas that comes with the package, as a page."""

import base64
import json
import re

import numpy as np
import pytest

from jpmhc import cli
from jpmhc.mixers import MIXERS
from jpmhc.report.explorer import LEVELS, MISSING
from jpmhc.report.page import LARGEST


def test_the_page_holds_the_atlas(tmp_path, capsys):
    path = tmp_path / "new" / "explore.html"
    cli.main(["explore", "--out", str(path)])
    assert capsys.readouterr().out == f"wrote {path}\n"
    text = path.read_text()
    assert len(text.encode()) < LARGEST
    assert not re.search(r"(src|href)=.https?:", text)
    data = json.loads(re.search(r"^const DATA = (.*);$", text, re.M).group(1))
    axes = dict(data["axes"])
    absent = [name for name in MIXERS if name not in axes["mixer"]]  # until benchmarks/compute_atlas.py has run
    assert axes["mixer"] == [name for name in MIXERS if name not in absent]
    assert ("Not computed for this page: " + ", ".join(absent) in text) == bool(absent)
    shape = (*(len(values) for _, values in data["axes"]), len(LEVELS) + 1)
    theory, sampled = (
        np.frombuffer(base64.b64decode(data[key]), "<u2").reshape(shape) for key in ("theory", "sampled")
    )
    known = theory[..., 0] != MISSING
    assert known.mean() > 0.9  # those that are missing are said to be
    assert (sampled[known][:, 0] != MISSING).all()
    # the theory of every choice lies on its samples
    apart = np.abs(theory[known][:, -1].astype(float) - sampled[known][:, -1]) / (MISSING - 1)
    assert np.median(apart) < 0.005
    assert np.quantile(apart, 0.99) < 0.06


def test_a_mixer_that_the_atlas_lacks_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(MIXERS, "householder", MIXERS["cayley"])
    path = tmp_path / "explore.html"
    cli.main(["explore", "--out", str(path)])
    assert "Not computed for this page: householder. " in path.read_text()


def test_a_name_that_no_browser_opens_is_refused(tmp_path, capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main(["explore", "--out", str(tmp_path / "explore")])
    assert ended.value.code != 0
    assert "must end in .html" in f"{ended.value.code}{capsys.readouterr().err}"
    assert not list(tmp_path.iterdir())
