"""The guide's blocks of Python run, one after the other."""

import re
from pathlib import Path

import pytest

from tests.wrap.models import WITHOUT

GUIDE = Path(__file__).parents[2] / "docs/guides/hugging_face.md"


def test_the_guide_runs():
    pytest.importorskip("transformers", reason=WITHOUT)
    pytest.importorskip("peft", reason="needs peft")
    names: dict[str, object] = {"__name__": "guide"}
    blocks = re.findall(r"^```python\n(.*?)^```", GUIDE.read_text(), re.M | re.S)
    assert len(blocks) == 6
    for block in blocks:
        exec(compile(block, str(GUIDE), "exec"), names)
