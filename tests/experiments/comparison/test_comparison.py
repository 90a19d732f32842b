"""Comparisons: what their runs share, what is not done again, and what is refused."""

import dataclasses
import json
import math

import pytest
import torch

from jpmhc.experiments.comparison.comparison import Comparison, compare
from jpmhc.experiments.comparison.experiment import Job
from jpmhc.experiments.comparison.language import PRESETS, LanguageExperiment, LanguageSession
from jpmhc.experiments.comparison.recursive import RecursiveExperiment
from jpmhc.experiments.models.decoder import Decoder, DecoderConfig, count_parameters
from tests.experiments.text_files import make_token_folder
from tests.experiments.training.small_run import small

pytest.importorskip("tokenizers", reason="tokenizers is not installed")
MODEL = DecoderConfig(dim=16, heads=2, layers=1, length=16, streams=4)
TINY = LanguageExperiment(
    make_token_folder(),
    MODEL,
    batch=2,
    steps=3,
    warmup=1,
    lr=3e-3,
    evaluate_every=2,
    validation_rows=4,
    final_validation_rows=8,
)


def make(out, experiment=TINY, **changes):
    return Comparison(experiment, **{"arms": ("plain", "cayley"), "device": "cpu", **changes}, out=out)


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
    assert 1 < cayley["final"]["effective_rank"] < 4
    assert plain["environment"]["data"] == result["settings"]["text"]["fingerprint"]
    assert not list((tmp_path / "runs").glob("*.new"))


def test_the_loss_falls(tmp_path):
    (run,) = compare(make(tmp_path, dataclasses.replace(TINY, steps=60, warmup=10, lr=1e-2), arms=("cayley",)))["runs"]
    losses = run["curves"]["train"]["loss"]
    assert losses[0] == pytest.approx(math.log(300), rel=0.05)
    assert run["final"]["loss"] < losses[0] - 1


def test_muon_moves_the_matrices_and_adamw_the_rest(tmp_path):
    experiment = dataclasses.replace(TINY, steps=30, optimizer="muon")
    (run,) = compare(make(tmp_path, experiment, arms=("cayley",)))["runs"]
    assert run["curves"]["train"]["loss"][-1] < run["curves"]["train"]["loss"][0] - 0.3


def test_streams_that_start_with_equal_reads_stay_equal(tmp_path):
    arms = ("cayley", "cayley:equal_start=true")
    experiment = dataclasses.replace(TINY, steps=20)
    apart, equal = compare(make(tmp_path, experiment, arms=arms))["runs"]
    assert equal["final"]["effective_rank"] == pytest.approx(1, abs=1e-3)
    assert equal["final"]["effective_rank"] < apart["final"]["effective_rank"]


def test_a_trained_decoder_is_diagnosed(tmp_path):
    experiment = dataclasses.replace(TINY, diagnose_seconds=1)
    run, delayed = compare(make(tmp_path, experiment, arms=("cayley", "cayley:delayed=true")))["runs"]
    assert delayed["final"].keys() < run["final"].keys()
    assert 0 <= run["final"]["jacobian_lost"] < 0.5
    assert run["final"]["jacobian_largest"] > 1
    assert run["final"]["layer_gradients_spread"] > 1


def test_mixing_logits_decay_if_everything_does(tmp_path):
    experiment = dataclasses.replace(TINY, steps=5, weight_decay=0.5)
    model = Decoder(dataclasses.replace(MODEL, vocabulary=300, mixer="cayley"))
    for decays in (False, True):
        (adamw,) = dataclasses.replace(experiment, decay_everything=decays).make_optimizers(model, 1e-2)
        (decay,) = (
            g["weight_decay"]
            for g in adamw.param_groups
            if any(p is model.network.connections[0].map.bias for p in g["params"])
        )
        assert decay == (0.5 if decays else 0)


def test_finished_runs_are_kept_and_rates_and_seeds_are_added(tmp_path):
    compare(make(tmp_path))
    file = tmp_path / "runs" / "plain-lr-0.003-seed-0.json"
    file.write_text(file.read_text().replace('"seed": 0', '"seed": 0, "mark": 1'))
    result = compare(make(tmp_path, arms=("plain",), learning_rates=(3e-3, 1e-2), seeds=(0, 1)))
    jobs = [(run["arm"], run["learning_rate"], run["seed"]) for run in result["runs"]]
    best = result["summary"][0]["learning_rate"]
    expected = {("plain", 3e-3, 0), ("plain", 1e-2, 0), ("plain", best, 1), ("cayley", 3e-3, 0)}
    assert set(jobs) == expected
    assert len(jobs) == 4
    assert next(run for run in result["runs"] if run["learning_rate"] == 3e-3 and run["seed"] == 0)["mark"] == 1


def test_a_run_that_was_stopped_goes_on_with_equal_bits(tmp_path):
    experiment = dataclasses.replace(TINY, steps=50, evaluate_every=20)
    job = Job("cayley", 3e-3, 0)
    session = LanguageSession(experiment, torch.device("cpu"))
    whole = session.train(job, tmp_path / "whole", lambda: False, lambda job, progress: None)
    weights = {name: value.clone() for name, value in session.model.state_dict().items()}
    assert session.train(job, tmp_path / "cut", lambda: True, lambda job, progress: None) is None
    steps = []
    again = LanguageSession(experiment, torch.device("cpu"))
    cut = again.train(job, tmp_path / "cut", lambda: False, lambda job, progress: steps.append(progress.step))
    assert steps[0] > 20
    assert cut["curves"] == whole["curves"]
    assert all(torch.equal(value, weights[name]) for name, value in again.model.state_dict().items())


def test_a_session_trains_the_same_run_whatever_it_did_before(tmp_path):
    train = TINY.open(torch.device("cpu"))
    jobs = [Job("cayley", 3e-3, 0), Job("cayley", 1e-2, 1), Job("cayley", 3e-3, 0)]
    runs = [train(job, tmp_path, lambda: False, lambda job, progress: None) for job in jobs]
    assert runs[0]["curves"] == runs[2]["curves"] != runs[1]["curves"]


def test_the_time_limit_leaves_runs_for_the_next_command(tmp_path):
    said = []
    experiment = dataclasses.replace(TINY, steps=25)
    result = compare(make(tmp_path, experiment, arms=("plain",), minutes=1e-9), say=said.append)
    assert result["runs"] == []
    assert said == ["1 runs are missing or not finished: the same command goes on with them"]
    assert len(compare(make(tmp_path, experiment, arms=("plain",)))["runs"]) == 1


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


def test_the_order_of_an_arms_options_does_not_matter(tmp_path):
    (first,) = compare(make(tmp_path, arms=("cayley:streams=2,read=sigmoid",)))["runs"]
    assert first["arm"] == "cayley:read=sigmoid,streams=2"
    assert compare(make(tmp_path, arms=("cayley:read=sigmoid,streams=2",)))["runs"] == [first]
    # a file that an earlier version wrote with the options in another order
    own, other = (Job(arm, 3e-3, 0) for arm in (first["arm"], "cayley:streams=2,read=sigmoid"))
    path = tmp_path / "runs" / f"{own.file_name}.json"
    path.with_name(f"{other.file_name}.json").write_text(json.dumps({**first, "arm": other.arm}))
    path.unlink()
    assert compare(make(tmp_path, arms=(other.arm,)))["runs"] == [first]
    with pytest.raises(ValueError, match="arms must be one or more, each named once"):
        make(tmp_path, arms=(own.arm, other.arm))


def test_runs_of_another_folder_are_taken_over(tmp_path):
    first = compare(make(tmp_path / "a", arms=("plain",)))
    result = compare(make(tmp_path / "b", runs=(tmp_path / "a" / "comparison.json",)))
    assert result["runs"][0] == first["runs"][0]
    assert [run["arm"] for run in result["runs"]] == ["plain", "cayley"]
    other = make(tmp_path / "c", dataclasses.replace(TINY, steps=4), runs=(tmp_path / "a" / "comparison.json",))
    with pytest.raises(ValueError, match="other settings: steps"):
        compare(other)
    with pytest.raises(ValueError, match=r"settings\.json is no comparison\.json"):
        compare(make(tmp_path / "d", runs=(tmp_path / "a" / "settings.json",)))


def test_a_damaged_file_is_named(tmp_path):
    compare(make(tmp_path))
    file = tmp_path / "runs" / "plain-lr-0.003-seed-0.json"
    file.write_text('{"arm": ')
    with pytest.raises(ValueError, match=r"seed-0\.json is not a JSON file .*: remove it, and its run is done again"):
        compare(make(tmp_path))
    file.write_text((tmp_path / "runs" / "cayley-lr-0.003-seed-0.json").read_text())
    with pytest.raises(ValueError, match=r"plain-lr-0\.003-seed-0\.json holds another run than its name says"):
        compare(make(tmp_path))
    (tmp_path / "settings.json").write_text("{")
    with pytest.raises(ValueError, match=r"settings\.json is not a JSON file .*: name another folder"):
        compare(make(tmp_path))


def test_several_processes_give_the_same_runs(tmp_path):
    alone = compare(make(tmp_path / "a"))
    several = compare(make(tmp_path / "b", processes=2))
    for one, other in zip(alone["runs"], several["runs"], strict=True):
        assert one["final"] == pytest.approx(other["final"], rel=1e-5)


def test_arms_have_options_of_the_model_and_of_training():
    two = TINY.configure("cayley:streams=2,read=sigmoid,dynamic=false,temperature=2,weight_decay=0")
    assert (two.model.mixer, two.model.streams, two.model.mixer_read) == ("cayley", 2, "sigmoid")
    assert (two.model.mixer_dynamic, two.model.mixer_temperature, two.weight_decay) == (False, 2.0, 0.0)
    assert TINY.configure("plain").model.plain
    assert TINY.configure("plain:layers=4").model.layers == 4
    assert TINY.configure("plain-long:time_factor=2").steps == 6
    assert TINY.configure("cayley").model.vocabulary == 300
    for arm in ("plain:streams=2", "plain-wide:streams=4", "plain-long:mixer=cayley,streams=4"):
        with pytest.raises(ValueError, match="is the plain model, which has no streams"):
            TINY.configure(arm)


def test_the_wide_plain_model_is_as_large_as_the_largest():
    experiment = dataclasses.replace(TINY, model=dataclasses.replace(MODEL, dim=64, layers=2))
    wide = count_parameters(experiment.configure("plain-wide").model)
    sinkhorn = count_parameters(experiment.configure("sinkhorn").model)
    plain = count_parameters(experiment.configure("plain").model)
    assert wide - plain >= (sinkhorn - plain) - 3 * 64 * 16 / 2  # half of the smallest widening


@pytest.mark.parametrize("preset", PRESETS)
def test_presets_configure_every_kind_of_arm(preset):
    experiment = dataclasses.replace(PRESETS[preset], tokens=make_token_folder())
    for arm in ("plain", "plain-wide", "plain-long", "identity", "cayley:streams=2"):
        assert experiment.configure(arm).model.dim == experiment.model.dim


def test_a_run_that_diverges_is_recorded(tmp_path):
    result = compare(make(tmp_path, dataclasses.replace(TINY, steps=4), learning_rates=(1e30,)))
    assert [run["diverged"] for run in result["runs"]] == [2, 2]
    assert result["summary"][0]["diverged"] == 1
    assert result["summary"][0]["metrics"] == {}


def test_the_recursive_model_is_compared_through_its_training_loop(tmp_path):
    run = small(tmp_path, model={"streams": 2}, steps=3, evaluate_every=2)
    compare(make(tmp_path / "c", RecursiveExperiment(run), arms=("plain",)))
    remains = tmp_path / "c" / "training" / Job("cayley", run.lr, 0).file_name
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


def test_arms_have_settings_of_their_mixers(tmp_path):
    basis = tmp_path / "basis.json"
    basis.write_text('{"perms": [[0, 1, 2, 3], [1, 2, 3, 0]]}')
    arms = ("sinkhorn:gradient=gauss_seidel,iterations=3,tolerance=1e-3", f"permutation:basis={basis}")
    experiments = (TINY, RecursiveExperiment(small(tmp_path, model={"streams": 4}, steps=1)))
    for number, experiment in enumerate(experiments):
        runs = compare(make(tmp_path / f"out-{number}", experiment, arms=arms))["runs"]
        assert [run["arm"] for run in runs] == list(arms)
        settings = [experiment.configure(arm).model.mixer_settings() for arm in arms]
        assert settings[0] == {"iterations": 3, "tolerance": 1e-3, "gradient": "gauss_seidel"}
        assert settings[1] == {"basis": ((0, 1, 2, 3), (1, 2, 3, 0))}
        assert runs[0]["parameters"] > runs[1]["parameters"]


def test_an_arm_may_be_a_mixer_of_ones_own(tmp_path):
    [run] = compare(make(tmp_path, TINY, arms=("tests.own:Shrinking:streams=3",)))["runs"]
    assert math.isfinite(run["final"]["loss"])


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"arms": ("nowhere:Mine",)}, "there is no module 'nowhere'"),
        ({"arms": ("plain", "none")}, "no mixer is called 'none'"),
        ({"arms": ()}, "arms must be one or more"),
        ({"arms": ("cayley:streams",)}, "must be a mixer and options, such as cayley:streams=2"),
        ({"arms": ("cayley:height=2",)}, "has no option height: its options are dim, "),
        ({"arms": ("cayley:streams=two",)}, "streams in the arm .* must be like 4, not 'two'"),
        ({"arms": ("plain:steps=100000",)}, "100000 steps of 2 rows need 200,000 rows of 16 tokens"),
        ({"arms": ("cayley:rank=2",)}, "the mixer cayley has no mixer_rank: it has mixer_iterations, mixer_scale"),
        ({"arms": ("permutation:basis=nowhere",)}, "nowhere cannot be read"),
        ({"seeds": (1, 1)}, "seeds must be one or more, each named once, not 1 1"),
        ({"learning_rates": (0.0,)}, "learning_rates must be positive"),
        ({"processes": 0}, "processes must be"),
        ({"minutes": 0.0}, "minutes must be positive"),
    ],
)
def test_bad_comparisons_are_refused(tmp_path, changes, sentence):
    with pytest.raises(ValueError, match=sentence):
        make(tmp_path, **changes)
