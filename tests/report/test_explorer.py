"""Spectra computed beforehand: what is kept is what the theory and the samples say."""

import numpy as np
import pytest
from benchmarks.compute_atlas import AXES, assemble_atlas, compute_choice, list_choices, pack, write_atlas

from jpmhc.mixers import MIXERS
from jpmhc.report.explorer import HIGHEST, LEVELS, LOWEST, MISSING, read_atlas


def unpack(values: np.ndarray) -> np.ndarray:
    """Singular values that `pack` wrote, as the page reads them; NaN where they are missing."""
    logs = LOWEST + values.astype(np.float64) / (MISSING - 1) * (HIGHEST - LOWEST)
    return np.where(values == MISSING, np.nan, 10.0**logs)


def test_packing_keeps_singular_values_to_a_thousandth_and_marks_what_is_missing():
    values = np.logspace(-7.9, 7.9, 1000)
    assert unpack(pack(values)) == pytest.approx(values, rel=1e-3)
    assert unpack(pack(np.array([0.0, 1e-12]))) == pytest.approx([1e-8, 1e-8])
    assert np.isnan(unpack(np.array([MISSING], np.uint16)))[0]


@pytest.mark.parametrize("norm", AXES["norm"])
def test_the_theory_lies_on_the_samples(norm):
    theory, sampled = (unpack(found[:-1]) for found in compute_choice(("cayley", 2, 4, 0.25, "gelu", norm)))
    inside = [k for k in range(4, len(LEVELS) - 4) if abs(LEVELS[k] - 0.5) > 0.06]  # two bands may meet there
    assert (np.diff(theory) >= 0).all()
    assert theory[inside] == pytest.approx(sampled[inside], rel=0.03)


def test_the_collapsed_share_is_kept():
    theory, sampled = compute_choice(("sinkhorn", 2, 24, 0.05, "linear", "none"))
    assert theory[-1] / (MISSING - 1) == pytest.approx(0.5, abs=0.003)
    assert sampled[-1] / (MISSING - 1) == pytest.approx(0.5, abs=1e-4)


def test_an_atlas_is_read_as_it_was_written_and_knows_what_it_lacks(tmp_path):
    choice = ("sinkhorn", 2, 4, 0.05, "linear", "none")
    mine, drawn = np.arange(len(LEVELS) + 1, dtype=np.uint16), np.arange(1, len(LEVELS) + 2, dtype=np.uint16)
    held = read_atlas(write_atlas(assemble_atlas({choice: (mine, drawn)}), tmp_path / "atlas.npz"))
    assert held.axes == dict(AXES)
    place = tuple(values.index(value) for values, value in zip(AXES.values(), choice))
    assert np.array_equal(held.theory[place], mine)
    assert np.array_equal(held.sampled[place], drawn)
    assert (held.theory != MISSING).any(-1).sum() == 1


def test_only_choices_that_a_mixer_takes_are_listed():
    found = {choice[:2] for choice in list_choices()}
    assert {mixer for mixer, _ in found} == set(MIXERS)
    assert all(MIXERS[mixer].why_not(streams) is None for mixer, streams in found)
