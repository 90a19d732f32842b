"""Comparisons: what their runs share, what is not done again, and what is refused."""

import dataclasses
import json

import pytest

from jpmhc.experiments.comparison import Comparison, LanguageExperiment, RecursiveExperiment, compare
from jpmhc.experiments.comparison.comparison import divide_work
from jpmhc.experiments.comparison.language import count_parameters
from jpmhc.experiments.tasks.language import DecoderConfig
from tests.experiments.training.small_run import small

MODEL = DecoderConfig(dim=16, heads=2, layers=1, length=16, streams=4)
TINY = LanguageExperiment(MODEL, batch=2, steps=3, warmup=1, evaluate_every=2, validation_windows=4)


def make(out, experiment=TINY, **changes):
    return Comparison(experiment, **{"mixers": ("plain", "cayley"), "seeds": (0,), "device": "cpu", **changes}, out=out)


def test_runs_have_curves_and_the_file_holds_everything(tmp_path):
    result = compare(make(tmp_path))
    assert json.loads((tmp_path / "comparison.json").read_text())["runs"] == json.loads(json.dumps(result["runs"]))
    plain, cayley = result["runs"]
    assert plain["curves"]["validation"]["step"] == cayley["curves"]["mixing"]["step"] == [2, 3]
    assert plain["curves"]["mixing"] == {}
    # equal data and equal weights: the first loss is the same, and the gradient reaches the new parameters too
    first, other = (run["curves"]["train"] for run in (plain, cayley))
    assert first["loss"][0] == pytest.approx(other["loss"][0], rel=1e-5)
    assert first["gradient_norm"][0] <= other["gradient_norm"][0] * (1 + 1e-5)
    assert result["settings"]["task"] == {"kind": "language"}
    assert cayley["final"]["collapsed"] == 0.0


def test_finished_runs_are_kept_and_seeds_are_added(tmp_path):
    compare(make(tmp_path))
    kept = tmp_path / "runs" / "plain-seed-0.json"
    kept.write_text(kept.read_text().replace('"seed": 0', '"seed": 0, "mark": 1'))
    result = compare(make(tmp_path, seeds=(0, 1)))
    assert [(run["mixer"], run["seed"]) for run in result["runs"]] == [
        ("plain", 0),
        ("plain", 1),
        ("cayley", 0),
        ("cayley", 1),
    ]
    assert result["runs"][0]["mark"] == 1


def test_other_settings_are_refused_and_nothing_is_overwritten(tmp_path):
    compare(make(tmp_path))
    before = {path: path.read_bytes() for path in tmp_path.rglob("*.json")}
    with pytest.raises(ValueError, match=r"other settings: steps \(3 there, 4 here\); name another folder"):
        compare(make(tmp_path, dataclasses.replace(TINY, steps=4)))
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.txt").write_text("…")
    with pytest.raises(ValueError, match="holds something that is no comparison"):
        compare(make(tmp_path / "other"))
    assert {path: path.read_bytes() for path in tmp_path.rglob("*.json")} == before


def test_a_damaged_file_is_named(tmp_path):
    compare(make(tmp_path))
    (tmp_path / "runs" / "plain-seed-0.json").write_text('{"mixer": ')
    with pytest.raises(ValueError, match=r"plain-seed-0\.json is damaged .*: remove it, and its run is done again"):
        compare(make(tmp_path))
    (tmp_path / "runs" / "plain-seed-0.json").write_text((tmp_path / "runs" / "cayley-seed-0.json").read_text())
    with pytest.raises(ValueError, match=r"plain-seed-0\.json does not hold the run of plain with seed 0"):
        compare(make(tmp_path))
    (tmp_path / "settings.json").write_text("{")
    with pytest.raises(ValueError, match=r"settings\.json is damaged .*: name another folder"):
        compare(make(tmp_path))


def test_several_processes_give_the_same_runs(tmp_path):
    alone = compare(make(tmp_path / "a"))
    several = compare(make(tmp_path / "b", processes=2))
    for one, other in zip(alone["runs"], several["runs"], strict=True):
        assert one["final"] == pytest.approx(other["final"], rel=1e-5)


def test_work_is_divided_by_mixer_and_finer_where_processes_would_be_idle(tmp_path):
    assert divide_work(make(tmp_path, seeds=(0, 1, 2), processes=2)) == [("plain", (0, 1, 2)), ("cayley", (0, 1, 2))]
    assert divide_work(make(tmp_path, seeds=(0, 1, 2), processes=4)) == [
        ("plain", (0, 1)),
        ("plain", (2,)),
        ("cayley", (0, 1)),
        ("cayley", (2,)),
    ]


def test_matched_models_are_as_large_as_the_largest(tmp_path):
    mixers = ("plain", "sinkhorn")
    free = TINY.configure("plain"), TINY.configure("sinkhorn")
    assert count_parameters(free[1]) - count_parameters(free[0]) > 1000
    experiment = dataclasses.replace(TINY, match_parameters=True)
    runs = compare(make(tmp_path, experiment, mixers=mixers))["runs"]
    assert abs(runs[0]["parameters"] - runs[1]["parameters"]) <= 3 * 16 * 16 / 2  # half of the smallest widening


def test_a_run_that_diverges_is_recorded(tmp_path):
    result = compare(make(tmp_path, dataclasses.replace(TINY, lr=1e30, steps=4)))
    assert [run["diverged"] for run in result["runs"]] == [2, 2]
    assert result["summary"][0]["diverged"] == 1
    assert result["summary"][0]["metrics"] == {}


def test_the_recursive_model_is_compared_through_its_training_loop(tmp_path):
    run = small(tmp_path, model={"streams": 2}, steps=3, evaluate_every=2)
    remains = tmp_path / "c" / "training" / "cayley-seed-0"
    compare(make(tmp_path / "c", RecursiveExperiment(run), mixers=("plain",)))
    remains.mkdir(parents=True)
    (remains / "config.json").write_text("of a run that was killed")
    result = compare(make(tmp_path / "c", RecursiveExperiment(run)))
    plain, cayley = result["runs"]
    assert plain["curves"]["train"]["loss"][0] == pytest.approx(cayley["curves"]["train"]["loss"][0], rel=1e-5)
    assert plain["curves"]["validation"]["step"] == [2, 3]
    assert set(plain["final"]) == {"loss", "exact_accuracy", "token_accuracy", "train_loss", "gradient_norm"}
    assert plain["environment"]["data"] == cayley["environment"]["data"]
    assert not any((tmp_path / "c" / "training").iterdir())
    assert result["settings"]["task"]["kind"] == "sudoku"


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"mixers": ("plain", "none")}, "no mixer is called 'none'"),
        ({"mixers": ()}, "mixers must be one or more"),
        ({"seeds": (1, 1)}, "seeds must be one or more, each named once, not 1 1"),
        ({"baseline": "sinkhorn"}, "the baseline sinkhorn must be among the mixers"),
        ({"processes": 0}, "processes must be"),
    ],
)
def test_bad_comparisons_are_refused(tmp_path, changes, sentence):
    with pytest.raises(ValueError, match=sentence):
        make(tmp_path, **changes)
