"""The page of a comparison: its table, its curves with intervals, and text that does no harm."""

import re

import numpy as np
import pytest

from jpmhc.experiments.comparison.statistics import summarize
from jpmhc.report.comparison import find_band
from jpmhc.report.comparison_page import render_comparison
from jpmhc.report.style import colour_of


def make_result(mixers=("plain", "cayley"), seeds=(0, 1)):
    runs = []
    for mixer in mixers:
        for seed in seeds:
            loss = 1.0 + 0.1 * seed - 0.5 * (mixer != "plain")
            mixing = {"step": [], "collapsed": []} if mixer == "plain" else {"step": [2, 4], "collapsed": [0.0, 0.25]}
            curves = {
                "train": {"step": [1, 2, 4], "loss": [2, 1.5, loss], "gradient_norm": [3.0, 2.0, 1.0]},
                "validation": {"step": [2, 4], "loss": [1.5, loss]},
                "mixing": mixing,
            }
            final = {"loss": loss, "gradient_norm": 1.0}
            runs.append(
                {"mixer": mixer, "seed": seed, "parameters": 10, "seconds": 1.0, "final": final, "curves": curves}
            )
    settings = {"mixers": mixers, "seeds": seeds, "baseline": mixers[0], "task": {"kind": "language"}}
    return {"settings": settings, "summary": summarize(runs, mixers, mixers[0]), "runs": runs}


def test_the_interval_of_positive_numbers_is_a_factor():
    curves = np.array([[1.0, 10.0], [2.0, 20.0], [4.0, 40.0]])
    mean, low, high = find_band(curves, as_factor=True)
    assert mean == pytest.approx(curves.mean(0))
    assert low[0] > 0
    assert high / mean == pytest.approx(mean / low)
    assert high[0] / low[0] == pytest.approx(high[1] / low[1])  # whatever the unit
    reach = 4.302653 * np.log(2) / 3**0.5  # Student's quantile of two degrees, standard error
    assert np.log(high / mean) == pytest.approx([reach] * 2, rel=1e-3)
    mean, low, high = find_band(curves)
    assert high - mean == pytest.approx(4.302653 * curves.std(0, ddof=1) / 3**0.5, rel=1e-3)


def test_table_and_curves_are_there():
    page = render_comparison(make_result())
    titles = re.findall(r"<figcaption>(.*?)</figcaption>", page)
    assert titles == [
        "validation loss",
        "loss minus that of plain",
        "gradient norm",
        "lost by the product of all skips",
    ]
    assert "-0.5000" in page  # the paired difference
    assert "2 mixers with 2 seeds each on the task language" in page
    assert colour_of("cayley") in page
    assert 'class="band"' in page
    assert "<script" not in page


def test_one_seed_and_hostile_names():
    page = render_comparison(make_result(("<b>plain", "cayley"), (3,)))
    assert "<b>plain" not in page
    assert "&lt;b&gt;plain" in page
    assert 'class="band"' not in page
