"""The demonstration on a small scale."""

from dataclasses import replace
from io import StringIO

import numpy as np
import pytest
from rich.console import Console

from jpmhc.experiments.demo import PLAIN, SHARES, DemoConfig, run_demo, train_once
from jpmhc.report.demo import sum_up, tabulate_outcomes, write_demo_page

SMALL = DemoConfig(mixers=("cayley", "sinkhorn"), depth=4, dim=12, steps=30, batch=32, seeds=2, workers=1)


@pytest.fixture(scope="module")
def outcomes():
    return run_demo(SMALL)


def test_every_model_learns_and_starts_as_the_plain_one(outcomes):
    assert [(o.name, o.seed) for o in outcomes] == [(n, s) for n in (PLAIN, "cayley", "sinkhorn") for s in (0, 1)]
    for outcome in outcomes:
        plain = outcomes[outcome.seed]
        assert outcome.steps == [0, 10, 20, 30]
        assert outcome.losses[0] == pytest.approx(plain.losses[0], rel=1e-4)
        assert outcome.losses[-1] < 0.7 * outcome.losses[0]
        assert len(outcome.gradients) == SMALL.depth
        assert min(outcome.gradients) > 0


def test_products_are_those_of_the_mixers(outcomes):
    products = {outcome.name: outcome.product for outcome in outcomes}
    assert products[PLAIN] == [1.0]
    assert products["cayley"] == pytest.approx([1.0] * 4, abs=1e-5)
    assert products["sinkhorn"][0] == pytest.approx(1, abs=1e-2)
    assert products["sinkhorn"][-1] < 1 - 1e-3


def test_the_theory_describes_the_fresh_network(outcomes):
    fresh = outcomes[0].fresh
    assert fresh.apart < 0.15
    assert fresh.apart_with_modes < 0.15
    assert abs(np.interp(0.5, SHARES, fresh.predicted) / np.interp(0.5, SHARES, fresh.measured) - 1) < 0.2
    assert [outcome.spectra is not None for outcome in outcomes] == [True, False] * 3


def test_several_processes_give_the_numbers_of_one():
    tiny = DemoConfig(mixers=("rotation",), depth=2, dim=8, steps=4, batch=8, seeds=1, workers=2)
    said = []
    shared = run_demo(tiny, lambda what, done, of: said.append((what, done, of)))
    alone = [train_once(tiny, name, 0) for name in (PLAIN, "rotation")]
    assert [(one.name, one.seed, one.losses) for one in shared] == [(one.name, 0, one.losses) for one in alone]
    assert {what for what, _, _ in said} == {f"{PLAIN}, seed 0", "rotation, seed 0"}
    assert [(done, of) for _, done, of in said] == [(1, 2), (2, 2)]


def test_table_page_and_lines_have_the_same_loss(outcomes, tmp_path):
    losses = [outcome.losses[-1] for outcome in outcomes[:2]]
    mean = f"{np.mean(losses):.3f} ± {np.std(losses, ddof=1):.3f}"
    console = Console(width=80, file=StringIO())
    console.print(tabulate_outcomes(outcomes, SMALL))
    assert "…" not in console.file.getvalue()  # nothing is cut on a terminal of 80 columns
    page = write_demo_page(outcomes, SMALL, tmp_path / "new" / "demo.html").read_text()
    lines = sum_up(outcomes, SMALL)
    assert len(lines) == 5
    for text in (console.file.getvalue(), page, lines[0]):
        assert mean in text
    for outcome in outcomes:
        assert outcome.name in page
    assert "4 pre-norm MLP layers of width 12, 4 streams" in page
    assert page.count("<figure") == 3 + 4
    assert "://" not in page.replace("http://www.w3.org", "")  # nothing is loaded


def test_a_run_that_diverges_is_named(tmp_path):
    config = DemoConfig(mixers=("unconstrained",), depth=2, dim=8, steps=3, batch=4, seeds=1, workers=1)
    plain = train_once(config, PLAIN, 0)
    wild = train_once(DemoConfig(**{**vars(config), "learning_rate": 1e30}), "unconstrained", 0)
    assert np.isnan(wild.losses[-1])
    assert "unconstrained diverged" in sum_up([plain, wild], config)[0]
    assert "diverged" in write_demo_page([plain, wild], config, tmp_path / "demo.html").read_text()


def test_bad_sizes_are_named():
    with pytest.raises(ValueError, match="depth must be a whole number, at least 1"):
        DemoConfig(depth=0)
    with pytest.raises(ValueError, match="learning_rate must be"):
        DemoConfig(learning_rate=float("nan"))
    with pytest.raises(ValueError, match="no mixer is called 'foo'"):
        DemoConfig(mixers=("foo",))


def test_a_lead_of_a_mixer_that_may_scale_the_stream_is_explained():
    run = train_once(DemoConfig(mixers=("unconstrained",), depth=2, dim=8, steps=3, batch=4, workers=1), PLAIN, 0)
    config = DemoConfig(mixers=("unconstrained", "cayley", "tests.own:Shrinking"), seeds=1)
    better = [replace(run, name=name, losses=[0.0], product=[3.0] * 4, start=[1.0] * 4) for name in config.mixers]
    last = sum_up([run, *better], config)[-1]
    assert "may also scale the residual stream (largest singular value of the product: unconstrained 3)" in last
    assert "may also scale" not in sum_up([run, *better[1:]], config)[-1]  # bounded, and with rows that sum to one
