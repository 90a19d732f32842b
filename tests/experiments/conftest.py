"""Fixtures of the tests of experiments."""

import pytest

from jpmhc.experiments.tasks.arc import Arc, ArcConfig


@pytest.fixture(scope="session")
def arc() -> Arc:
    """The public puzzles in up to seven variants each."""
    return ArcConfig(augmentations=6, seed=1).build()
