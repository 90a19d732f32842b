"""The picture of a diagnosis: with streams, without layers, and with Lanczos spectra."""

import pytest
import torch
from markupsafe import escape
from torch import nn

import jpmhc
from jpmhc.report.diagnosis import draw_diagnosis, render_diagnosis
from tests.diagnose.models import StreamNet


@pytest.mark.parametrize(
    ("model", "options"),
    [(StreamNet(), {}), (nn.Linear(12, 12), {}), (StreamNet(), {"method": "lanczos", "steps": 8})],
    ids=["streams", "no layers", "lanczos"],
)
def test_every_kind_of_diagnosis_is_drawn(model, options, tmp_path):
    found = jpmhc.diagnose(model, torch.randn(1, 3, 12), say=None, **options)
    path = draw_diagnosis(found, tmp_path / "new" / "diagnosis.png")
    assert path.read_bytes()[:4] == b"\x89PNG"
    page = render_diagnosis(found)
    for line in found.verdict:
        assert escape(line) in page
    table = page[: page.index("<figure")]
    assert table.count("mean stream, token") == sum(item.mean_stream is not None for item in found.comparisons)
    predicted = [part for item in found.comparisons for part in (item.predicted, item.mean_predicted)]
    assert table.count("… theory") == sum(part is not None for part in predicted)
    assert page.count("<figure") == 1 + len(found.comparisons) * (1 + (found.streams is not None)) + bool(
        found.layers
    ) + (found.streams is not None)
