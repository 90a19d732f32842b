"""The command `jpmhc evaluate`."""

import dataclasses
from functools import partial
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import tyro
from tyro._docstrings import get_field_docstring

from jpmhc.cli.command import Field, is_first_process, make_main, make_option_form, read_option_form
from jpmhc.experiments.evaluation.checkpoints import EvaluateConfig, evaluate_checkpoints
from jpmhc.experiments.evaluation.decoding import evaluate_decoder, find_decoder
from jpmhc.experiments.tasks import TASKS


def _describe_option(kind: str, name: str) -> tuple[str, Any, None]:
    """Return name, annotation and default of a form's field for an option of the task `kind`.

    The default None means that an evaluation uses the run's value.
    """
    words = f"In place of the run's ({kind}): {get_field_docstring(TASKS[kind], name, ())}"
    return name, Annotated[get_type_hints(TASKS[kind])[name] | None, tyro.conf.arg(help=words)], None


_changeable = {name: kind for kind, config in TASKS.items() for name in config.changeable}
_fields = [_describe_option(kind, name) for name, kind in _changeable.items()]
_TaskOptions = dataclasses.make_dataclass("TaskOptions", _fields, frozen=True)
# The annotation and the default of all task options that an evaluation may change.
TASK_OPTIONS: Field = Annotated[_TaskOptions, tyro.conf.arg(name="")], _TaskOptions()


def chosen_options(options: object) -> dict[str, object]:
    """Return the names and values of the task options that the command line gives."""
    return {name: value for name, value in vars(options).items() if value is not None}


_FORM = make_option_form(
    EvaluateConfig(), runs=(Annotated[tuple[Path, ...], tyro.conf.Positional], ()), task_options=TASK_OPTIONS
)


def evaluate(config: Annotated[type(_FORM), tyro.conf.arg(name="")]) -> None:  # type: ignore[valid-type]
    """Score checkpoints on held-out puzzles: exact accuracy, and for ARC pass@k by vote.

    Example: jpmhc evaluate out/laptop
    Example: jpmhc evaluate out/arc-small --variants 32 --out out/evaluation.json
    Example: jpmhc evaluate out/arc-decoder --variants 20

    Several processes: torchrun --nproc-per-node 8 -m jpmhc evaluate out/paper
    """
    chosen = read_option_form(config, task_options=chosen_options(config.task_options))
    if decoders := [path for run in chosen.runs if (path := find_decoder(run)) is not None]:
        if len(chosen.runs) > 1:
            raise ValueError("an ARC decoder is evaluated alone: name no other run")
        print(f"wrote {evaluate_decoder(decoders[0], chosen, partial(print, flush=True))[1]}")
        return
    evaluation = evaluate_checkpoints(chosen, partial(print, flush=True))
    if is_first_process():
        print(f"wrote {evaluation['choices']['out']}")


main = make_main(evaluate)
