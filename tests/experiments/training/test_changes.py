"""Changes of a resumed run: every setting that differs, spelt as options, and which of them are refused."""

import dataclasses
from pathlib import Path

from jpmhc.experiments.tasks.arc import ArcConfig
from jpmhc.experiments.training.changes import list_changes
from jpmhc.experiments.training.presets import PRESETS

THERE = PRESETS["laptop"]


def test_changes_are_spelt_as_options():
    here = dataclasses.replace(
        THERE,
        lr=1e-3,
        compile=True,
        decay_at=(0.5, 0.8),
        decay_to=(0.3, 0.1),
        clip=None,
        resume="latest",
        out=Path("x"),
    )
    assert [str(change) for change in list_changes(THERE, here)] == [
        "--lr 0.001 instead of 0.002",
        "--clip None instead of 1.0",
        "--decay-at 0.5 0.8 instead of (none)",
        "--decay-to 0.3 0.1 instead of (none)",
        "--compile instead of --no-compile",
    ]
    assert not any(change.refused for change in list_changes(THERE, here))
    assert list_changes(here, here) == []


def test_what_a_checkpoint_must_fit_is_refused_and_the_place_of_files_is_not():
    model = dataclasses.replace(THERE.model, dim=32)
    here = dataclasses.replace(THERE, batch=48, seed=3, model=model, steps=7)
    assert [(c.name, c.there, c.here) for c in list_changes(THERE, here) if c.refused] == [
        ("model.dim", 64, 32),
        ("batch", 64, 48),
        ("seed", 0, 3),
    ]
    assert "--dim 32 instead of 64" in map(str, list_changes(THERE, here))
    first, second = (
        dataclasses.replace(PRESETS["arc-small"], task=ArcConfig(extra_tasks=Path(place), translate=still))
        for place, still in (("/a", True), ("/b", False))
    )
    assert [(str(c), c.refused) for c in list_changes(first, second)] == [
        ("--task.extra-tasks /b instead of /a", False),
        ("--task.no-translate instead of --task.translate", True),
    ]
