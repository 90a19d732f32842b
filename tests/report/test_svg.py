"""SVG pictures: points lie where the data say, nothing is lost without a mark, and text is escaped."""

import re
from xml.etree import ElementTree

import numpy as np
import pytest

from jpmhc.report.svg import Axis, Line, draw_grid, draw_lines, draw_matrix

# The area inside the axes: left, right, top, bottom.
LEFT, RIGHT, TOP, BOTTOM = 68, 376, 12, 196


def parse(svg):
    return ElementTree.fromstring(svg)


def paths(svg, kind="line"):
    return [path for group in parse(svg).iter("g") if group.get("class") == kind for path in group.iter("path")]


def points(path):
    return np.array([[float(a), float(b)] for a, b in re.findall(r"[ML]([\d.]+) ([\d.]+)", path.get("d"))])


def test_points_lie_where_the_data_say():
    axes = Axis("x", limits=(0, 10)), Axis("y", True, (0.01, 100))
    svg = draw_lines([Line("a", [0, 5, 10], [0.01, 1, 100], "#123456")], *axes)
    expected = [[LEFT, BOTTOM], [(LEFT + RIGHT) / 2, (TOP + BOTTOM) / 2], [RIGHT, TOP]]
    assert points(paths(svg)[0]) == pytest.approx(np.array(expected), abs=0.06)
    words = [text.text for text in parse(svg).iter("text")]
    assert {"x", "y", "0.01", "100", "10"} <= set(words)


def test_words_of_two_marks_do_not_meet():
    axes = Axis("x", limits=(0, 10)), Axis("y", limits=(0, 1))
    svg = draw_lines([Line("a", [0, 10], [0, 1], "#123456")], *axes, marks=[(7.5, "here"), (8, "there")])
    heights = {text.text: float(text.get("y")) for text in parse(svg).iter("text") if text.text in ("here", "there")}
    assert heights["there"] - heights["here"] >= 12  # the size of the letters


def test_an_axis_that_counts_names_whole_numbers_alone():
    svg = draw_lines([Line("a", [1, 2, 3], [1, 1, 1], "#123456")], Axis("layer", whole=True), Axis("y", limits=(8, 9)))
    words = [text.text for text in parse(svg).iter("text")]
    assert {"1", "2", "3"} <= set(words)
    assert not {"1.5", "2.5"} & set(words)


def test_a_value_that_is_not_finite_leaves_a_gap():
    svg = draw_lines([Line("a", [1, 2, 3, 4], [1, float("nan"), 2, 3], "#123456")], Axis("x"), Axis("y"))
    assert paths(svg)[0].get("d").count("M") == 2


def test_what_lies_beyond_the_axis_is_marked_and_named():
    svg = draw_lines([Line("a", [1, 2, 3], [0.0, 0.5, 9.0], "#123456")], Axis("x"), Axis("y", True, (0.1, 1)))
    marks = [path for path in paths(svg) if path.get("class") == "beyond"]
    assert [mark.find("title").text for mark in marks] == ["a: 0, below the axis", "a: 9, above the axis"]


def test_long_lines_are_thinned_and_keep_their_extremes():
    y = np.sin(np.arange(100_000))
    y[40_000], y[70_000] = 50, -30
    svg = draw_lines([Line("a", np.arange(100_000), y, "#123456")], Axis("x"), Axis("y"), points=200)
    found = points(paths(svg)[0])
    assert len(found) <= 200
    span = 50 - -30
    heights = np.array([50, -30])
    expected = BOTTOM - (heights - (-30 - 0.04 * span)) / (1.08 * span) * (BOTTOM - TOP)
    assert [found[:, 1].min(), found[:, 1].max()] == pytest.approx(expected, abs=0.06)


def test_a_band_reaches_from_low_to_high():
    line = Line("a", [0, 1], [1, 1], "#123456", low=[0, 0], high=[2, 2])
    band = next(p for p in paths(draw_lines([line], Axis("x"), Axis("y", limits=(0, 2)))) if p.get("class") == "band")
    heights = points(band)[:, 1]
    assert (heights.min(), heights.max()) == (TOP, BOTTOM)


def test_a_matrix_shows_its_numbers_and_signs():
    svg = parse(draw_matrix([[1.0, -0.5], [0.25, float("nan")]]))
    assert [text.text for text in svg.iter("text")] == ["1.00", "-0.50", "0.25", "nan"]
    assert [r.get("class").split()[1] for r in svg.iter("rect")] == ["positive", "negative", "positive", "lost"]
    assert [float(r.get("fill-opacity")) for r in svg.iter("rect")][:2] == pytest.approx([0.85, 0.425], abs=0.006)


def test_cells_of_a_grid_have_their_colour_and_wrong_ones_a_cross():
    svg = parse(draw_grid([[1, 1, 2], [2, 1, 1]], wrong=[(1, 2)]))
    by_colour = {path.get("fill"): path.get("d") for path in svg.iter("path") if path.get("fill")}
    assert by_colour == {"#0074D9": "M0 0h2v1H0zM1 1h2v1H1z", "#FF4136": "M2 0h1v1H2zM0 1h1v1H0z"}
    crosses = [path.get("d") for path in svg.iter("path") if path.get("class") == "cross"]
    assert len(crosses) == 1
    assert crosses[0].startswith("M2.3 1.3")


def test_text_is_escaped_and_colours_are_colours():
    svg = draw_lines([Line("<script>", [1], [1], "#123456")], Axis("&x"), Axis("y"), description='"<b>')
    assert "<script>" not in svg
    assert "&lt;script&gt;" in svg
    assert parse(svg).get("aria-label") == '"<b>'
    with pytest.raises(ValueError, match="#rrggbb"):
        draw_lines([Line("a", [1], [1], "red;x:url(//evil)")], Axis("x"), Axis("y"))


def test_long_numbers_beside_an_axis_become_multiples_of_a_power_of_ten():
    svg = draw_lines([Line("a", [1, 2], [0.0004, 0.0006], "#123456")], Axis("step"), Axis("rate"))
    words = [text.text for text in parse(svg).iter("text")]
    assert "rate, in 10⁻⁴" in words
    assert "4" in words
    assert not any(word.startswith("0.000") for word in words)
