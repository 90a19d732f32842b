"""The command `jpmhc compare`."""

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from jpmhc.cli.forms import make_option_form, read_option_form
from jpmhc.cli.train import defaults_in, value_of
from jpmhc.experiments.comparison.comparison import Comparison
from jpmhc.experiments.comparison.comparison import compare as train_and_compare
from jpmhc.experiments.comparison.experiment import Experiment
from jpmhc.experiments.comparison.language import LanguageExperiment
from jpmhc.experiments.comparison.recursive import DECIDED, RecursiveExperiment
from jpmhc.experiments.models import RecursiveConfig
from jpmhc.experiments.tasks.language import DecoderConfig
from jpmhc.experiments.tasks.registry import TASKS, kind_of
from jpmhc.experiments.training.config import TrainConfig
from jpmhc.experiments.training.presets import PRESETS
from jpmhc.experiments.training.progress import Display
from jpmhc.files import write_file

_LANGUAGE = "language"
_FIXED = (tyro.conf.Fixed, tyro.conf.Suppress)  # of options that a comparison decides itself
_KINDS: Any = Annotated[
    Literal[(_LANGUAGE, *TASKS)], tyro.conf.arg(help="Which task; it decides the options of the model and of training.")
]


def main(words: Sequence[str]) -> None:
    """Parse the words after `jpmhc compare` and run it with the options of the task they name."""
    kind = value_of("--task.kind", words, (_LANGUAGE, *TASKS)) or (
        _LANGUAGE if value_of("--preset", words, PRESETS) is None else kind_of(defaults_in(words).task)
    )
    form, read = _language_form() if kind == _LANGUAGE else _recursive_form(defaults_in([*words, "--task.kind", kind]))
    tyro.cli(compare_with_form(form, read), prog="jpmhc compare", args=words)


def compare_with_form(form: Any, read: Callable[[Any], Experiment]) -> Callable[..., None]:
    """Return the command's function for one task's options."""
    default = Comparison()

    def compare(
        run: Annotated[type(form), tyro.conf.arg(name="")] = form,  # type: ignore[valid-type]
        mixers: tuple[str, ...] = default.mixers,
        seeds: tuple[int, ...] = default.seeds,
        baseline: str = default.baseline,
        processes: int = default.processes,
        device: Literal["auto", "cpu", "cuda"] = default.device,
        out: Path = default.out,
    ) -> None:
        """Train every mixer with several seeds on one task, and compare them where nothing else differs.

        Example: jpmhc compare --mixers plain cayley sinkhorn --seeds 0 1 2 --processes 2 --out out/compare
        Example: jpmhc compare --task.kind sudoku --task.size 6 --steps 1000 --out out/sudoku6

        With one seed all mixers see the same data in the same order, take the same steps at the same learning rates,
        and start from the same weights outside their connections. A command that was interrupted goes on where it was,
        and mixers and seeds can be added later.

        Args:
            run: What is trained.
            mixers: Names of mixers; plain is the model with plain residual connections.
            seeds: Seeds of initial weights and of the order of the data.
            baseline: The mixer that is subtracted from the others, seed by seed.
            processes: Runs trained at the same time; on one GPU they share it.
            device: Where to train.
            out: Folder for comparison.json, .md, .png and .html. Finished runs in it are not done again.
        """
        from jpmhc.report.comparison import draw_comparison, format_table
        from jpmhc.report.comparison_page import render_comparison
        from jpmhc.report.page import write_page

        comparison = Comparison(read(run), mixers, seeds, baseline, processes, device, out)
        with Display() as display:
            result = train_and_compare(comparison, display.show)
        table = format_table(result)
        print(table)
        write_file(out / "comparison.md", table + "\n")
        draw_comparison(result, out / "comparison.png")
        print(f"wrote {out / 'comparison.json'}, {out / 'comparison.md'} and {out / 'comparison.png'}")
        print(f"wrote {write_page(render_comparison(result), out / 'comparison.html')}")

    return compare


@dataclasses.dataclass(frozen=True)
class _LanguageTask:
    """What is learned: the bytes of Python's standard library."""

    kind: _KINDS = _LANGUAGE


def _language_form() -> tuple[Any, Callable[[Any], Experiment]]:
    default = LanguageExperiment()
    decided = {name: (Annotated[Any, *_FIXED], getattr(default.model, name)) for name in ("mixer", "extra_inner")}
    model = make_option_form(default.model, **decided)
    form = make_option_form(
        default,
        task=(_LanguageTask, _LanguageTask()),
        model=(Annotated[type(model), tyro.conf.arg(name="")], model),
    )
    return form, lambda run: read_option_form(run, LanguageExperiment, model=read_option_form(run.model, DecoderConfig))


def _recursive_form(default: TrainConfig) -> tuple[Any, Callable[[Any], Experiment]]:
    streams = max(default.model.streams, 4)
    default = dataclasses.replace(default, model=dataclasses.replace(default.model, streams=streams))
    task = make_option_form(
        default.task,
        kind=(_KINDS, kind_of(default.task)),
        seed=(Annotated[int, *_FIXED], default.task.seed),
    )
    model = make_option_form(default.model, mixer=(Annotated[str, *_FIXED], default.model.mixer))
    decided = {name: (Annotated[Any, *_FIXED], getattr(default, name)) for name in DECIDED}
    form = make_option_form(
        default,
        task=(type(task), task),
        model=(Annotated[type(model), tyro.conf.arg(name="")], model),
        **decided,
    )

    def read(run: Any) -> Experiment:
        task = read_option_form(run.task, TASKS[run.task.kind])
        return RecursiveExperiment(
            read_option_form(run, TrainConfig, task=task, model=read_option_form(run.model, RecursiveConfig))
        )

    return form, read
