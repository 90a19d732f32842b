"""A task that is entered in the registry is trained and scored from the command line, and obeys the laws."""

import json

import pytest

from jpmhc import cli
from jpmhc.experiments.tasks import TASKS, kind_of
from tests.experiments.tasks import laws
from tests.experiments.tasks.copying import CopyingConfig


@pytest.fixture(autouse=True)
def copying(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(TASKS, "copying", CopyingConfig)


def test_a_new_task_is_trained_and_scored_from_the_command_line(tmp_path, capsys):
    size = ["--dim", "16", "--heads", "2", "--inner-multiple", "16", "--batch", "32", "--device", "cpu"]
    run = ["--task.kind", "copying", "--task.width", "3", "--steps", "150", "--lr", "1e-2", "--evaluate-every", "0"]
    cli.main(["train", "--preset", "laptop", *size, *run, "--out", str(tmp_path)])
    saved = json.loads((tmp_path / "config.json").read_text())
    assert saved["task"] == {"kind": "copying", "width": 3, "seed": 0}
    cli.main(["evaluate", str(tmp_path), "--device", "cpu"])
    assert "held out: 12 rows: exact accuracy 100.00 %" in capsys.readouterr().out


def test_a_new_task_obeys_the_laws():
    config = CopyingConfig()
    assert kind_of(config) == "copying"
    for law in (laws.rows_are_a_function_of_configuration_and_position, laws.another_seed_is_another_task):
        law(config)
    laws.configuration_survives_json(config)
    laws.only_promised_options_can_be_overridden(config)
    laws.selections_are_ordered_and_without_repetition(config.build(), config)
    laws.scores_do_not_depend_on_order_or_processes(config.build())


def test_a_broken_law_is_noticed(monkeypatch: pytest.MonkeyPatch):
    """Rows that depend on the order in which they are requested."""
    task = CopyingConfig().build()
    kind = type(task)
    whole = kind._draw
    monkeypatch.setattr(kind, "_draw", lambda self, purpose, rows: whole(self, purpose, rows + rows[0]))
    with pytest.raises(AssertionError):
        laws.rows_are_a_function_of_configuration_and_position(CopyingConfig())
    with pytest.raises(AssertionError):
        laws.a_resumed_run_gets_the_batches_it_would_have_got(task)
