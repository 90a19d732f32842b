"""The shipped table of losses against the stored comparison, and the pages that show it against the table."""

import json
from pathlib import Path

import pytest

from jpmhc.diagnose.recommend import read_losses
from jpmhc.experiments.comparison.statistics import summarize

ROOT = Path(__file__).parents[2]
LOSSES = read_losses()["minus_plain"]


def stored_differences():
    runs = json.loads((ROOT / "benchmarks" / "results" / "mixers" / "language.json").read_text())["runs"]
    arms = [arm for arm in dict.fromkeys(run["arm"] for run in runs) if not arm.startswith("plain") and ":" not in arm]
    rows = summarize(runs, ["plain", *arms], ("plain",))[1:]
    return {row["arm"]: row["differences"]["plain"]["mean"] for row in rows}


def test_the_table_is_the_stored_comparison():
    assert {arm: round(mean, 3) for arm, mean in stored_differences().items()} == LOSSES


@pytest.mark.parametrize("page", ["docs/results/which_mixer.md", "docs/guides/which_mixer.md"])
@pytest.mark.parametrize("mixer", LOSSES)
def test_the_pages_show_the_table(page, mixer):
    number = f"{LOSSES[mixer]:.3f}".replace("-", "−")
    rows = [
        line for line in (ROOT / page).read_text().splitlines() if line.startswith((f"| {mixer} ", f"| `{mixer}` "))
    ]
    assert any(number in row for row in rows), f"{page} does not give {number} for {mixer}"


def test_the_readme_gives_the_range_of_the_table():
    low, high = (f"{-end(LOSSES.values()):.2f}" for end in (max, min))
    assert f"by {low} to {high} nats per token" in (ROOT / "README.md").read_text()


def test_the_results_page_gives_the_differences_of_the_second_text():
    runs = json.loads((ROOT / "benchmarks" / "results" / "mixers" / "language_second.json").read_text())["runs"]
    loss = {run["arm"]: run["final"]["loss"] for run in runs}
    numbers = [f"{loss[arm] - loss['plain']:.3f}".replace("-", "−") for arm in ("cayley", "unconstrained")]
    for page in ("docs/results/which_mixer.md", "docs/guides/which_mixer.md"):
        assert all(number in (ROOT / page).read_text() for number in numbers)
