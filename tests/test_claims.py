"""The record of the paper's claims: complete, the page's source, and quick claims still as stored."""

import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FOLDERS = [str(ROOT / "benchmarks" / "claims"), str(ROOT / "benchmarks")]


@pytest.fixture(scope="module")
def modules():
    """The record and the page's writer, imported as `python benchmarks/claims` imports them."""
    pytest.importorskip("scipy", reason="scipy is not installed")
    sys.path[:0] = FOLDERS
    import cost  # noqa: F401
    import equations  # noqa: F401
    import methods  # noqa: F401
    import page
    import record
    import training  # noqa: F401

    import manifolds  # noqa: F401
    import spectra  # noqa: F401

    yield record, page
    for folder in FOLDERS:
        sys.path.remove(folder)


def test_the_page_is_what_the_record_says(modules):
    record, page = modules
    assert sorted(record.CLAIMS) == list(range(1, 76))
    assert (ROOT / "docs" / "claims.md").read_text() == page.render(record.CLAIMS.values())


def test_the_map_of_the_paper_names_every_claim(modules):
    rows = [line for line in (ROOT / "docs" / "guides" / "paper.md").read_text().splitlines() if line.startswith("| ")]
    named: set[int] = set()
    for row in rows:
        for numbers in re.findall(r"(?:\(|^)([\d–, ]+)", row.rstrip("| ").rpartition("| ")[2]):
            for first, last in re.findall(r"(\d+)(?:–(\d+))?", numbers):
                named |= set(range(int(first), int(last or first) + 1))
    assert named == set(modules[0].CLAIMS)


@pytest.mark.parametrize("number", [10, 13, 31, 42, 46, 52, 57, 66])
def test_quick_claims_still_hold(modules, number):
    record, _ = modules
    item = record.CLAIMS[number]
    assert item.holds(record.run(item))


def test_a_number_that_left_its_tolerance_is_seen(modules):
    record, _ = modules
    item = record.CLAIMS[32]
    assert item.holds((10.0,))
    assert not item.holds((8.0,))
    assert not item.holds((10.0, 10.0))
    assert not record.CLAIMS[33].holds((0.1,))
