"""Pages: heat maps show their numbers, and a page's file must be one that a browser opens."""

import re

import pytest

from jpmhc.report.charts import Axis, Chart, Line
from jpmhc.report.page import Section, render_page, show_matrix, write_page
from jpmhc.report.style import INK


def cells(picture):
    return re.findall(r'<td class="(\w+)" style="--share:(\d+)%">(.*?)</td>', str(picture.content))


def test_a_heat_map_shows_numbers_and_signs():
    found = cells(show_matrix("m", [[1.0, -0.5], [0.25, float("nan")]]))
    assert [text for *_, text in found] == ["1.00", "-0.50", "0.25", "nan"]
    assert [kind for kind, *_ in found] == ["positive", "negative", "positive", "lost"]
    assert [int(share) for _, share, _ in found][:3] == pytest.approx([85, 42.5, 21], abs=0.6)


def test_a_logarithmic_heat_map_tells_small_numbers_apart():
    found = cells(show_matrix("m", [[0.003, 0.0004], [1.0, 100.0]], logarithmic=True))
    assert [text for *_, text in found] == ["3e-3", "4e-4", "1", "1e2"]
    shares = [int(share) for _, share, _ in found]
    assert shares[1] < shares[0] < shares[2] < shares[3] == 85


def test_a_page_must_have_the_ending_of_one(tmp_path):
    with pytest.raises(ValueError, match=r"must end in \.html"):
        write_page("<p>", tmp_path / "page.txt")
    assert write_page("<p>", tmp_path / "new" / "page.html").read_text() == "<p>"


def test_a_legend_has_the_colours_of_its_page():
    lines = [Line("dark on light", [1, 2], [1, 2], INK), Line("blue", [1, 2], [2, 1], "#2f7de1")]
    page = render_page("t", [], [Section("s", charts=[Chart("c", lines, Axis("x"), Axis("y"))])])
    assert re.findall(r'<path d="M0 4H26" style="stroke: ([^"]+)"', page) == ["var(--ink)", "#2f7de1"]
