"""Configurations: the schedule, the presets against the paper's tables, and a round trip through JSON."""

import dataclasses
import math
from pathlib import Path

import pytest

from jpmhc.experiments.tasks.arc import ArcConfig
from jpmhc.experiments.training.config import TrainConfig, list_changes
from jpmhc.experiments.training.presets import PRESETS


def test_rate_rises_linearly_and_drops_at_the_fractions():
    config = TrainConfig(steps=100, warmup=10, decay_at=(0.8, 0.9), decay_to=(0.316, 0.1))
    assert [config.learning_rate_factor(step) for step in (0, 4, 9, 10, 79, 80, 89, 90, 99)] == pytest.approx(
        [0.1, 0.5, 1.0, 1.0, 1.0, 0.316, 0.316, 0.1, 0.1]
    )
    assert dataclasses.replace(config, warmup=0).learning_rate_factor(0) == 1.0


def test_paper_preset_has_the_numbers_of_its_tables():
    c = PRESETS["paper"]
    assert (c.batch, c.lr, c.warmup, c.clip, c.weight_decay, c.steps) == (768, 1e-4, 2000, 1.0, 0.1, 500_000)
    assert (c.decay_at, c.decay_to, c.puzzle_lr, c.ema) == ((0.8, 0.9), (0.316, 0.1), 1e-2, 0.999)
    m = c.model
    assert (m.dim, m.streams, m.heads, m.layers, m.halt_max_steps, m.halt_exploration) == (512, 4, 8, 2, 16, 0.1)
    assert (m.h_cycles, m.l_cycles, m.puzzle_slots, m.compute, m.mixer_form) == (3, 6, 16, "bfloat16", "paper")
    assert PRESETS["trm"].model.plain
    assert PRESETS["trm"].clip is None
    assert PRESETS["trm"].decay_at == ()


@pytest.mark.parametrize("name", list(PRESETS))
def test_presets_survive_json(name):
    assert TrainConfig.from_json(PRESETS[name].to_json()) == PRESETS[name]


def test_paths_and_tuples_survive_json():
    task = ArcConfig(extra_tasks=Path("some/folder"), tasks=("007bbfb7", "00d62c1b"))
    model = {"mixer": "permutation", "streams": 2, "mixer_basis": ((0, 1), (1, 0))}
    config = dataclasses.replace(PRESETS["arc-small"], task=task, out=Path("a/b"))
    config = dataclasses.replace(config, model=dataclasses.replace(config.model, **model))
    assert TrainConfig.from_json(config.to_json()) == config


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"steps": 0}, "steps"),
        ({"decay_at": (0.5,)}, "differ in length"),
        ({"decay_at": (0.9, 0.5), "decay_to": (0.1, 0.1)}, "rising"),
        ({"decay_at": (1.5,), "decay_to": (0.1,)}, r"^decay_at must lie in \(0, 1\), got 1.5"),
        ({"ema": 1.0}, "ema"),
        ({"clip": 0.0}, "clip"),
        ({"warmup": -1}, r"^warmup must lie in \[0, inf\), got -1"),
        ({"evaluate_every": -1}, r"^evaluate_every must lie in \[0, inf\)"),
        ({"lr": math.nan}, r"^lr must lie in \[0, inf\), got nan"),
        ({"lr": math.inf}, r"^lr must lie in \[0, inf\), got inf"),
        ({"puzzle_lr": math.inf}, r"^puzzle_lr must lie in \[0, inf\)"),
        ({"frame_lr": math.nan}, r"^frame_lr must lie in \[0, inf\)"),
        ({"weight_decay": -0.1}, r"^weight_decay must lie in \[0, inf\), got -0.1"),
        ({"puzzle_weight_decay": math.nan}, r"^puzzle_weight_decay must lie in \[0, inf\)"),
        ({"betas": (0.9, 1.0)}, r"^betas must lie in \[0, 1\), got 1.0"),
        ({"frame_iterations": 0}, "^frame_iterations must be .* at least 1, got 0"),
        ({"decay_at": (0.5,), "decay_to": (-1.0,)}, r"^decay_to must lie in \[0, 1\], got -1.0"),
        ({"decay_at": (0.5,), "decay_to": (math.nan,)}, "^decay_to must lie in"),
        ({"decay_at": (0.5, 0.9), "decay_to": (0.1, 1.5)}, "^decay_to must lie in"),
        ({"task": ArcConfig(), "evaluate_variants": 0}, "^evaluate_variants must be .* at least 1, got 0"),
        ({"evaluate_variants": 3}, "evaluate_variants is for tasks whose variants vote; sudoku has none"),
        ({"seed": 10**23}, r"^seed must lie between -2\^63 and 2\^64 - 1, not at 1000"),
        ({"task": ArcConfig(seed=-(10**23))}, r"^task\.seed must lie between"),
    ],
)
def test_bad_fields_are_named(change, message):
    with pytest.raises(ValueError, match=message):
        TrainConfig(**change)


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
        "lr 0.001 instead of 0.002",
        "clip None instead of 1.0",
        "decay_at [0.5, 0.8] instead of []",
        "decay_to [0.3, 0.1] instead of []",
        "compile True instead of False",
    ]
    assert not any(change.refused for change in list_changes(THERE, here))
    assert list_changes(here, here) == []


def test_what_a_checkpoint_must_fit_is_refused_and_the_place_of_files_is_not():
    model = dataclasses.replace(THERE.model, dim=32)
    here = dataclasses.replace(THERE, batch=48, seed=3, model=model, steps=7)
    assert [(c.name, c.saved, c.present) for c in list_changes(THERE, here) if c.refused] == [
        ("model.dim", 64, 32),
        ("batch", 64, 48),
        ("seed", 0, 3),
    ]
    assert "model.dim 32 instead of 64" in map(str, list_changes(THERE, here))
    first, second = (
        dataclasses.replace(PRESETS["arc-small"], task=ArcConfig(extra_tasks=Path(place), translate=still))
        for place, still in (("/a", True), ("/b", False))
    )
    assert [(str(c), c.refused) for c in list_changes(first, second)] == [
        ("task.extra_tasks /b instead of /a", False),
        ("task.translate False instead of True", True),
    ]
