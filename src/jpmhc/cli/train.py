"""The command `jpmhc train`, whose options tyro reads from forms (see `command.py`)."""

import dataclasses
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import tyro
from tyro.constructors import PrimitiveConstructorSpec

from jpmhc.cli.command import Field, Form, is_first_process, make_option_form, parse_and_call, read_option_form
from jpmhc.experiments.models.connections import ConnectionConfig, read_basis
from jpmhc.experiments.tasks import TASKS, kind_of
from jpmhc.experiments.training import arc_loop, loop, run_folder
from jpmhc.experiments.training.checkpoint import choose_checkpoint
from jpmhc.experiments.training.config import ArcDecoderRun, TrainConfig
from jpmhc.experiments.training.presets import DECODERS, PRESETS

Basis = tuple[tuple[int, ...], ...] | None


def main(words: Sequence[str]) -> None:
    """Parse the words after `jpmhc train`, and train with the defaults of the named preset and task."""
    decoder = value_of("--preset", words, DECODERS)
    function = train_with_defaults(defaults_in(words)) if decoder is None else train_decoder(DECODERS[decoder])
    parse_and_call(function, "jpmhc train", words)


def defaults_in(words: Sequence[str]) -> TrainConfig:
    """Return the options' defaults: from the preset that the words name, or from the run that --resume continues.

    If the words name a task, it replaces the task of the preset or run.
    """
    preset, kind = value_of("--preset", words, PRESETS), value_of("--task.kind", words, TASKS)
    default = PRESETS[preset or "laptop"]
    resume = value_of("--resume", words) or "no"
    if preset is None and resume != "no":
        out = Path(value_of("--out", words) or default.out)
        run_folder.refuse_busy_folder(out)
        if (resumed := choose_checkpoint(out, resume)) is not None:
            default = dataclasses.replace(resumed.config, out=out, stop_at=None)
    if default.compile and (value_of("--device", words, ("cpu",)) or not torch.cuda.is_available()):
        default = dataclasses.replace(default, compile=False)  # on a CPU, compilation takes minutes and gains little
    return default if kind in (None, kind_of(default.task)) else default.with_task(str(kind))


def value_of(option: str, words: Sequence[str], known: Collection[str] | None = None) -> str | None:
    """Return an option's value, or its last value if it is given twice; None if it is missing or not in `known`."""
    values = [""]
    for word, following in zip(words, [*words[1:], ""]):
        name, equals, value = word.partition("=")
        if name == option:
            values.append(value if equals else following)
    return values[-1] if (values[-1] in known if known is not None else values[-1]) else None


def train_with_defaults(default: TrainConfig) -> Callable[[Form], None]:
    """Return the function of `jpmhc train` for the recursive model, with these defaults."""
    known: Any = Literal[tuple(TASKS)]
    kinds = Annotated[known, tyro.conf.arg(help="Which task; it decides the other options of this group.")]
    form = make_run_form(default, {"kind": (kinds, kind_of(default.task))}, {})

    def train(config: Annotated[type(form), tyro.conf.arg(name="")] = form) -> None:  # type: ignore[valid-type]
        """Train the recursive model on Sudoku or ARC.

        Example: jpmhc train --preset laptop --mixer cayley --streams 4 --out out/cayley
        Example: jpmhc train --preset arc-small --task.kind sudoku --task.size 9
        Example: jpmhc train --resume latest --out out/cayley

        The defaults below come from the preset that the command line names (by default laptop), or with --resume from
        the checkpoint. --task.kind replaces the preset's task, and the options --task.… are then the new task's. On a
        CPU nothing is compiled without --compile. Several processes:
        torchrun --nproc-per-node 8 -m jpmhc train --preset paper

        The presets arc-decoder, arc-decoder-long and arc-decoder-tiny train another model, a decoder for ARC, with
        options of its own: jpmhc train --preset arc-decoder --help
        """
        run_training(read_option_form(config))

    return train


def train_decoder(default: ArcDecoderRun) -> Callable[[Form], None]:
    """Return the function of `jpmhc train` for the ARC decoder, with these defaults."""
    form = make_run_form(default, {}, {})

    def train(config: Annotated[type(form), tyro.conf.arg(name="")] = form) -> None:  # type: ignore[valid-type]
        """Train a decoder for ARC from scratch on pairs of grids, and let it answer the evaluation puzzles.

        Example: jpmhc train --preset arc-decoder --mixer cayley --streams 4 --out out/cayley
        Example: jpmhc train --preset arc-decoder-long --minutes 10 --resume --out out/arc-decoder-long

        On an H200, arc-decoder trains for a few minutes and answers for one more, and arc-decoder-long takes half an
        hour; arc-decoder-tiny is for a CPU. --resume continues a run that --minutes or a signal stopped;
        its result is the same to the bit.
        """
        run = read_option_form(config)
        outcome = arc_loop.train_decoder(run)
        if outcome.score is not None:
            print(f"finished after {outcome.step} steps; everything is in {run.out}")
            print(outcome.score.summarize())
        else:
            answers = "before its answers" if outcome.finished else f"after {outcome.step} steps"
            print(f"stopped {answers}; the same command with --resume goes on")
        if outcome.stopped:
            sys.exit(128 + outcome.stopped)

    return train


def run_training(config: TrainConfig) -> None:
    """Train, print the end of the run, and after a signal exit with status 128 plus the signal's number."""
    outcome = loop.train(config)
    end = "stopped by a signal" if outcome.stopped else "finished"
    if outcome.checkpoint is None and is_first_process():
        print(f"{end} before the first step: nothing was trained, and nothing was saved")
    elif is_first_process():
        log = config.out / "log.jsonl"
        print(f"{end} after {outcome.step} steps; checkpoint: {outcome.checkpoint}; log: {log}")
    if outcome.stopped:
        sys.exit(128 + outcome.stopped)  # 130 for Ctrl-C


def make_run_form(
    default: TrainConfig | ArcDecoderRun, task: Mapping[str, Field], model: Mapping[str, Field], **fields: Field
) -> Form:
    """Return the form of a run's configuration, in which the task's options have the prefix "task.".

    `task`, `model` and `fields` are changed or new fields of the forms of the task, of the model and of the run.
    """
    own = make_option_form(default.task, **task)
    return make_option_form(default, task=(type(own), own), model=model_field(default.model, **model), **fields)


def model_field(default: ConnectionConfig, **fields: Field) -> Field:
    """Return the annotation and value of a form's field for a model, whose options have no prefix.

    The option of a mixer's permutations takes a file.
    """
    model = make_option_form(default, mixer_basis=(_BASIS, default.mixer_basis), **fields)
    return Annotated[type(model), tyro.conf.arg(name="")], model


def _read_basis(words: list[str]) -> Basis:
    try:
        return None if words == ["None"] else read_basis(Path(words[0]))
    except ValueError as error:  # tyro keeps a TypeError's message
        raise TypeError(f"takes a file with permutations: {error}") from None


_BASIS: Any = Annotated[
    Basis,
    PrimitiveConstructorSpec(
        nargs=1,
        metavar="FILE",
        instance_from_str=_read_basis,
        is_instance=lambda value: value is None or isinstance(value, tuple),
        str_from_instance=lambda value: [str(value)],
    ),
    tyro.conf.arg(
        aliases=["--basis"],
        help="The permutations themselves: a file of jpmhc generators --json, or a list of permutations as JSON.",
    ),
]
