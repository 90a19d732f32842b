"""Colours and ticks."""

import itertools

import pytest
from matplotlib.colors import to_rgb

from jpmhc.mixers import ENSEMBLES, MIXERS, Mixer
from jpmhc.report import style
from jpmhc.report.style import PLAIN, colour_of, linear_ticks, logarithmic_ticks, tick_labels


def luminance(colour: str) -> float:
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in to_rgb(colour)]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(first: str, second: str) -> float:
    low, high = sorted((luminance(first), luminance(second)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("further", [0, 20])
def test_every_mixer_has_a_colour_of_its_own_that_can_be_seen_on_both_pages(further, monkeypatch):
    known = {**MIXERS, **{f"further {number}": Mixer for number in range(further)}}
    monkeypatch.setattr(style, "MIXERS", known)
    colours = [colour_of(mixer) for mixer in known]
    assert len(set(colours)) == len(known)
    for colour, page in itertools.product(colours, ("#ffffff", "#15171b")):
        assert contrast(colour, page) > 2.9, (colour, page)


def test_random_skips_have_the_colour_of_their_mixer():
    for ensemble, mixer in ENSEMBLES.items():
        assert colour_of(ensemble) == colour_of(mixer.name)
    assert colour_of(None) == colour_of("plain") == colour_of("plain-wide") == PLAIN


def test_a_mixer_of_ones_own_has_a_colour():
    colours = [colour_of(name) for name in ("my_mixers:Shrinking", "my_mixers:Householder")]
    assert len({PLAIN, *colours, *map(colour_of, MIXERS)}) == len(MIXERS) + 3
    assert colours == [colour_of(name) for name in ("my_mixers:Shrinking", "my_mixers:Householder")]
    for colour, page in itertools.product(colours, ("#ffffff", "#15171b")):
        assert contrast(colour, page) > 2.9


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [(0, 1, ["0", "0.2", "0.4", "0.6", "0.8", "1"]), (0, 2e-3, ["0", "0.0005", "0.001", "0.0015", "0.002"])],
)
def test_linear_ticks(low, high, expected):
    assert tick_labels(linear_ticks(low, high)) == expected


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (0.7, 2.3, ["0.7", "1", "1.5", "2"]),
        (0.05, 1.2, ["0.05", "0.1", "0.2", "0.5", "1"]),
        (1e-7, 0.1, ["10⁻⁶", "10⁻⁴", "0.01"]),
        (1, 1000, ["1", "10", "100", "1000"]),
        (0.98, 1.03, ["0.98", "0.99", "1", "1.01", "1.02", "1.03"]),
    ],
)
def test_logarithmic_ticks_are_round_and_few(low, high, expected):
    assert tick_labels(logarithmic_ticks(low, high)) == expected
