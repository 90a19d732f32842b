"""The page of a comparison: its table, its curves with intervals, and text that does no harm."""

import re

import numpy as np
import pytest

from jpmhc.experiments.comparison.statistics import compare_means, summarize
from jpmhc.report.comparison import (
    draw_comparison,
    find_band,
    find_baselines,
    format_table,
    make_charts,
    render_comparison,
)
from jpmhc.report.style import colour_of


def make_result(arms=("plain", "cayley"), seeds=(0, 1), rates=(1e-3,)):
    runs = []
    for arm in arms:
        for seed in seeds:
            for rate in rates:
                loss = 1.0 + 0.1 * seed - 0.5 * (arm != "plain") + 10 * rate + 0.01 * seed * (arm == "plain")
                mixing = {"step": [], "collapsed": []} if arm == "plain" else {"step": [2, 4], "collapsed": [0.0, 0.25]}
                curves = {
                    "train": {"step": [1, 2, 4], "loss": [2, 1.5, loss], "gradient_norm": [3.0, 2.0, 1.0]},
                    "validation": {"step": [2, 4], "loss": [1.5, loss]},
                    "mixing": mixing,
                }
                runs.append(
                    {
                        "arm": arm,
                        "seed": seed,
                        "learning_rate": rate,
                        "parameters": 10,
                        "steps": 4,
                        "seconds": 1.0,
                        "step_seconds": 0.01,
                        "tokens_per_second": None,
                        "peak_bytes": None,
                        "final": {"loss": loss, "gradient_norm": 1.0},
                        "curves": curves,
                    }
                )
    settings = {"task": {"kind": "language"}}
    summary = summarize(runs, arms, arms[:1])
    return {"settings": settings, "summary": summary, "equal_means": compare_means(runs, arms), "runs": runs}


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
        "validation loss minus that of plain, by seed",
        "gradient norm",
        "lost by the product of all skips",
        "final loss minus that of plain, by seed",
    ]
    assert "-0.5050" in page  # the paired difference
    assert "2 arms on the task language, 4 runs" in page
    assert colour_of("cayley") in page
    assert '<g class="band"' in page
    assert "<script" not in page


@pytest.mark.parametrize("arms", [("plain", "identity"), ("plain", "identity", "cayley")])
def test_the_first_baseline_stays_the_first(arms):
    result = make_result(arms)
    result["summary"] = summarize(result["runs"], arms, ("plain", "identity"))
    assert find_baselines(result) == ["plain", "identity"]


def test_one_seed_has_no_error_bars():
    several, one = (render_comparison(make_result(seeds=seeds)) for seeds in ((0, 1), (0,)))
    for words in ("95 % interval", "standard error"):
        assert words in several
        assert words not in one


def test_one_seed_and_hostile_names():
    page = render_comparison(make_result(("<b>plain", "cayley"), (3,)))
    assert "<b>plain" not in page
    assert "&lt;b&gt;plain" in page
    assert '<g class="band"' not in page


def test_the_table_names_the_best_rate_and_the_test():
    table = format_table(make_result(rates=(2e-3, 1e-3)))
    assert "| cayley | 2 | 10 | 0.001 of 2 | 0.5600 ± 0.0500 | -0.5050 |" in table
    assert "Equal mean losses of plain, cayley over seeds 0, 1: F = " in table


def test_charts_without_data_are_left_out():
    """A comparison of one arm and one seed has no differences and no intervals; no chart of it is empty."""
    titles = [chart.title for chart in make_charts(make_result(("plain",), (0,)))]
    assert titles == ["validation loss", "gradient norm"]
    assert all(chart.lines for chart in make_charts(make_result(rates=(1e-3, 2e-3))))


def test_differences_and_their_intervals_are_drawn_where_they_are():
    chart = make_charts(make_result(("plain", "cayley"), (0, 1)))[-1]
    [dot] = [line for line in chart.lines if line.marker == "o"]
    assert dot.x == pytest.approx([-0.505])
    assert chart.y.names == ["cayley"]
    assert dot.filled  # zero is outside the interval


@pytest.mark.parametrize("rates", [(1e-3,), (1e-3, 2e-3)])
def test_the_figure_is_drawn(tmp_path, rates):
    result = make_result(("plain", "cayley", "cayley:streams=2"), rates=rates)
    assert draw_comparison(result, tmp_path / "a.png").stat().st_size > 10_000
    assert draw_comparison(make_result(("plain",), (0,), rates), tmp_path / "b.png").stat().st_size > 10_000
