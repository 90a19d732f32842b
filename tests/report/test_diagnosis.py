"""The picture of a diagnosis: with streams, without layers, and with Lanczos spectra."""

import pytest
import torch
from markupsafe import escape
from torch import nn

import jpmhc
from jpmhc.report.diagnosis import render_diagnosis
from tests.diagnose.models import StreamNet
from tests.own import Shrinking


@pytest.mark.parametrize(
    ("model", "options"),
    [(StreamNet(), {}), (nn.Linear(12, 12), {}), (StreamNet(), {"method": "lanczos", "steps": 8})],
    ids=["streams", "no layers", "lanczos"],
)
def test_every_kind_of_diagnosis_is_drawn(model, options, tmp_path):
    found = jpmhc.diagnose(model, torch.randn(1, 3, 12), say=None, **options)
    for ending, head in (("png", b"\x89PNG"), ("svg", b"<?xml"), ("pdf", b"%PDF")):
        path = tmp_path / "new" / f"diagnosis.{ending}"
        figure = found.plot(path)
        assert path.read_bytes().startswith(head)
    assert figure._repr_png_()[:4] == b"\x89PNG"  # what a notebook shows
    (line,) = found.whole.plot(str(tmp_path / "whole.svg")).axes[0].lines[:1]
    assert line.get_xdata()[-1] == pytest.approx(found.whole.largest)
    assert (tmp_path / "whole.svg").stat().st_size > 1000
    assert all(ax.lines for ax in figure.axes)
    assert found.save_page(tmp_path / "page.html").read_text().startswith("<!doctype html>")
    assert str(escape(found.verdict[0])) in found._repr_html_()
    page = render_diagnosis(found)
    for line in found.verdict:
        assert escape(line) in page
    table = page[: page.index("<figure")]
    assert table.count("mean stream, token") == sum(item.own is not None for item in found.comparisons)
    predicted = [part for item in found.comparisons for part in (item.predicted, item.own and item.own.predicted)]
    assert table.count("… theory") == sum(part is not None for part in predicted)
    assert page.count("<figure") == 1 + sum(
        1 + (found.streams is not None) + (item.own is not None) for item in found.comparisons
    ) + bool(found.layers) + (found.streams is not None)


def test_a_recommendation_is_drawn_and_its_repr_is_short(tmp_path):
    found = jpmhc.recommend(4, mixers=["cayley", Shrinking(4), "identity"])
    assert repr(found) == "Recommendation(cayley, shrinking, identity)"
    assert len(repr(found.best)) < 500
    figure = found.plot(str(tmp_path / "recommendation.svg"))
    assert (tmp_path / "recommendation.svg").stat().st_size > 1000
    for ax in figure.axes:
        assert [label.get_text() for label in ax.get_yticklabels()] == ["cayley", "shrinking", "identity"]
    assert "shrinking" in found._repr_html_()


def test_differences_that_are_lost_in_the_first_layer_are_drawn(recwarn):
    found = jpmhc.recommend(4, 2, mixers=["cayley", "grassmann"])
    assert found.candidates[-1].layers_until_collapse == 0
    found.plot()._repr_png_()
    assert not [one for one in recwarn if "layout" in str(one.message)]
