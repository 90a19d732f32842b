"""Sizes that cannot fit are refused before anything is allocated."""

import pytest

from tests.cli.running import fails_with


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("spectrum --streams 100000", "a network of 10 layers and 100000 streams needs"),
        ("spectrum --depth 10000000000", r"a network of 10000000000 layers and 4 streams needs about [\d,]+ GiB"),
        ("spectrum --simulate --width 1000000", "a sampled network of 4 streams of 1000000 features needs"),
        ("panel --streams 100000", "a network of 1 layers and 100000 streams needs"),
        ("recommend --streams 100000", "the theory of 24 layers with 100000 streams needs"),
        ("demo --dim 10000000", "layers of width 10000000 needs"),
        ("train --dim 10000000", r"a model of 2.4e\+15 weights .* needs"),
        ("train --dim 10000000 --mixer cayley --streams 4", "a model of .* needs"),
        ("train --streams 100000 --mixer cayley --mixer-form paper", "streams must be at most 1024"),
    ],
)
def test_sizes_that_cannot_fit_are_refused(capsys, tmp_path, words, sentence):
    fails_with(capsys, sentence, *words.split(), "--out", str(tmp_path / "out"))
