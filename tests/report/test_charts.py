"""Charts: points lie where the data say, nothing is lost without a mark, and text is escaped."""

import re
from xml.etree import ElementTree

import numpy as np
import pytest
from matplotlib.figure import Figure

from jpmhc.report.charts import Axis, Chart, Line, draw_figure, draw_svg
from jpmhc.report.style import save_figure


def lines(chart):
    """The lines of a chart as matplotlib drew them: x and y of each."""
    ax = Figure().add_subplot()
    chart.draw(ax)
    return ax, [np.array(line.get_data(), float) for line in ax.lines if len(line.get_xdata())]


def test_points_lie_where_the_data_say_also_on_a_page():
    chart = Chart(
        "t", [Line("a", [0, 5, 10], [0.01, 1, 100], "#123456")], Axis("x", limits=(0, 10)), Axis("y", True, (0.01, 100))
    )
    ax, [line] = lines(chart)
    assert line.tolist() == [[0, 5, 10], [0.01, 1, 100]]
    assert (ax.get_xlim(), ax.get_ylim(), ax.get_yscale()) == ((0, 10), (0.01, 100), "log")
    svg = ElementTree.fromstring(draw_svg(chart))
    path = next(part for group in svg.iter() if group.get("class") == "line" for part in group.iter() if part.get("d"))
    points = np.array([[float(a), float(b)] for a, b in re.findall(r"[ML] ([\d.]+) ([\d.]+)", path.get("d"))])
    assert points[1] == pytest.approx((points[0] + points[2]) / 2, abs=0.05)  # straight in the logarithm
    words = {part.text for part in svg.iter() if part.tag.endswith("text")}
    assert {"x", "y", "0.01", "100", "10"} <= words


def test_numbers_of_a_page_are_written_in_full():
    """Coordinates are rounded, but the text of a tick is not."""
    chart = Chart("t", [Line("a", [0, 1], [0.001, 0.004], "#123456")], Axis("x"), Axis("y"))
    svg = draw_svg(chart)
    words = {part.text for part in ElementTree.fromstring(svg).iter() if part.tag.endswith("text")}
    assert {"0.001", "0.002", "0.003", "0.004"} <= words
    assert not re.search(r"\d\.\d{3}", re.sub(r">[^<]*<", "><", svg))


def test_words_of_two_marks_do_not_meet():
    marks = [(7.5, "here"), (8, "there")]
    ax, _ = lines(Chart("t", [Line("a", [0, 10], [0, 1], "#123456")], Axis("x"), Axis("y"), marks))
    heights = [text.xyann[1] for text in ax.texts]
    assert abs(heights[0] - heights[1]) >= 10


def test_an_axis_that_counts_names_whole_numbers_alone():
    ax, _ = lines(Chart("t", [Line("a", [1, 2, 3], [1, 1, 1], "#123456")], Axis("layer", whole=True), Axis("y")))
    assert [label.get_text() for label in ax.get_xticklabels()] == ["1", "2", "3"]


def test_values_beyond_the_axis_are_marked_at_its_end():
    y = Axis("y", True, (0.1, 1))
    _, drawn = lines(Chart("t", [Line("a", [1, 2, 3], [0.0, 0.5, 9.0], "#123456")], Axis("x"), y))
    assert drawn[0][1].tolist() == [0.1, 0.5, 1.0]
    assert [part.tolist() for part in drawn[1:]] == [[[1.0], [0.1]], [[3.0], [1.0]]]


def test_values_that_are_not_finite_leave_gaps():
    _, [line] = lines(Chart("t", [Line("a", [1, 2, 3], [1, float("inf"), 2], "#123456")], Axis("x"), Axis("y")))
    assert np.isnan(line[1]).tolist() == [False, True, False]


def test_long_lines_are_thinned_and_keep_their_extremes():
    y = np.sin(np.arange(100_000))
    y[40_000], y[70_000] = 50, -30
    _, [line] = lines(Chart("t", [Line("a", np.arange(100_000), y, "#123456")], Axis("x"), Axis("y")))
    assert line.shape[1] <= 600
    assert (line[1].max(), line[1].min()) == (50, -30)


def test_lines_of_one_name_share_an_entry_of_the_legend():
    three = [Line("a", [1], [1], "#123456"), Line("", [1], [1], "#123456"), Line("b", [1], [1], "#654321")]
    assert list(Chart("t", [*three, three[0]], Axis("x"), Axis("y")).legend) == ["a", "b"]
    assert not Chart("t", three[:2], Axis("x"), Axis("y")).legend


def test_a_single_point_has_its_marker_in_the_legend_and_a_long_name_is_broken():
    points = [Line(name, [1], [0], "#123456") for name in ("a", "b")]
    figure = draw_figure([Chart("t", points, Axis("x"), Axis("", names=["short", "my_mixers:Shrinking:streams=2"]))])
    handles = figure.axes[0].get_legend().legend_handles
    assert [handle.get_marker() for handle in handles] == ["o", "o"]
    names = [label.get_text() for label in figure.axes[0].get_yticklabels()]
    assert names == ["short", "my_mixers:\nShrinking:\nstreams=2"]


def test_empty_charts_are_left_out_of_a_figure(tmp_path):
    full = Chart("full", [Line("a", [1, 2], [1, 2], "#123456")], Axis("x"), Axis("y"))
    empty = Chart("empty", [], Axis("x"), Axis("y"))
    assert [ax.get_title() for ax in draw_figure([empty, full, empty]).axes] == ["full"]
    heads = {"png": b"\x89PNG", "svg": b"<?xml", "pdf": b"%PDF"}
    for ending, head in heads.items():
        first, second = (save_figure(draw_figure([full]), tmp_path / f"{k}.{ending}").read_bytes() for k in "ab")
        assert first == second
        assert first.startswith(head)
    with pytest.raises(ValueError, match=r"must end in \.png, \.svg or \.pdf"):
        save_figure(draw_figure([full]), tmp_path / "a.jpeg")


def test_long_numbers_beside_an_axis_have_room():
    def left_end(values):
        chart = Chart("t", [Line("", [1, 2], values, "#123456")], Axis("x"), Axis("y"))
        return float(re.search(r'class="line">.*?d="M ([\d.]+) ', draw_svg(chart), re.S)[1])

    assert left_end([-0.00011, -0.00014]) > left_end([0.1, 0.4]) + 10


def test_text_is_escaped_and_takes_the_colours_of_the_page():
    chart = Chart('"<b>', [Line("<script>$x$", [1, 2], [1, 2], "#123456")], Axis("&x $y"), Axis("y"))
    svg = draw_svg(chart)
    assert "<script>" not in svg
    names = {part.text for part in ElementTree.fromstring(svg).iter() if part.tag.endswith("title")}
    assert names == {"<script>$x$"}
    assert "var(--ink)" in svg
    assert "var(--soft)" in svg
    assert 'id="line' not in svg
