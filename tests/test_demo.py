"""The demonstration on a small scale."""

from io import StringIO

import pytest
from PIL import Image
from rich.console import Console

import jpmhc
from jpmhc.demo import DemoConfig, train_every_mixer
from jpmhc.report.demo import draw_outcomes, tabulate_outcomes

SMALL = DemoConfig(depth=4, dim=16, steps=40, batch=32)


@pytest.fixture(scope="module")
def outcomes():
    return {outcome.mixer: outcome for outcome in train_every_mixer(SMALL)}


def test_every_mixer_learns(outcomes):
    assert list(outcomes) == list(jpmhc.MIXERS)
    for outcome in outcomes.values():
        assert outcome.losses[-1] < 0.6 * outcome.losses[0]
        assert len(outcome.gradients) == SMALL.depth
        assert min(outcome.gradients) > 0


def test_measurements_are_those_of_the_mixers(outcomes):
    # orthogonal skips compose to an orthogonal matrix, bistochastic ones contract, projectors of rank 2 leave rank 2
    assert outcomes["identity"].product == [1.0] * 4
    assert outcomes["cayley"].product == pytest.approx([1.0] * 4, abs=1e-5)
    assert outcomes["sinkhorn"].product[0] == pytest.approx(1, abs=1e-2)
    assert outcomes["sinkhorn"].product[-1] < 1 - 1e-3
    assert outcomes["grassmann"].product[2] < 1e-5
    assert outcomes["cayley"].violation < 3e-6
    assert all(-1 / 3 - 1e-6 <= outcome.similarity <= 1 + 1e-6 for outcome in outcomes.values())


def test_same_seed_gives_the_same_numbers(outcomes):
    again = next(train_every_mixer(SMALL))
    assert again.losses == outcomes["identity"].losses


def test_table_and_figure_show_every_mixer(outcomes, tmp_path):
    assert tabulate_outcomes(list(outcomes.values())).row_count == len(jpmhc.MIXERS)
    console = Console(width=80, file=StringIO())
    console.print(tabulate_outcomes(list(outcomes.values())))
    assert "…" not in console.file.getvalue()  # nothing is cut on a terminal of 80 columns
    path = draw_outcomes(list(outcomes.values()), tmp_path / "new" / "demo.png")
    with Image.open(path) as image:
        assert image.width > 1000
        assert len(image.convert("RGB").getcolors(maxcolors=2**24)) > 100


def test_bad_sizes_are_named():
    with pytest.raises(ValueError, match="depth must be at least 1"):
        DemoConfig(depth=0)
