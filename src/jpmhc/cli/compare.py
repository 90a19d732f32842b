"""The command `jpmhc compare`, whose options tyro reads from forms (see `command.py`)."""

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from jpmhc import checks
from jpmhc.cli.command import Field, Form, make_option_form, parse_and_call, read_option_form
from jpmhc.cli.train import defaults_in, make_run_form, model_field, value_of
from jpmhc.experiments.comparison.arc_decoder import ArcDecoderExperiment
from jpmhc.experiments.comparison.comparison import Comparison
from jpmhc.experiments.comparison.comparison import compare as train_and_compare
from jpmhc.experiments.comparison.experiment import Experiment, Job, Progress
from jpmhc.experiments.comparison.language import PRESETS, LanguageExperiment
from jpmhc.experiments.comparison.recursive import RecursiveExperiment
from jpmhc.experiments.tasks import TASKS
from jpmhc.experiments.tasks.language import prepare_tokens
from jpmhc.experiments.training.config import ArcDecoderRun, TrainConfig
from jpmhc.experiments.training.presets import DECODERS
from jpmhc.experiments.training.progress import Display
from jpmhc.files import write_file

_LANGUAGE, _ARC_DECODER = "language", "arc-decoder"
_LANGUAGE_ARMS: tuple[str, ...] = ("plain", "identity", "sinkhorn", "cayley", "rotation")

Say = Callable[[str], None]  # prints a line
Reader = Callable[[Form, Say], Experiment]  # turns a form with the parsed options into an experiment


def main(words: Sequence[str]) -> None:
    """Parse the words after `jpmhc compare`, and run the task that the first word names (by default language)."""
    tasks = (_LANGUAGE, _ARC_DECODER, *TASKS)
    experiment: type[Experiment]
    if words and not words[0].startswith("-"):
        checks.choice(words[0], tasks, "task")
    named = [word for word in words[:2] if word in tasks]  # the words may begin with --help
    kind = named[0] if named else _LANGUAGE
    words = [word for position, word in enumerate(words) if position > 1 or word != kind]
    if kind == _LANGUAGE:
        form, read = _language_form(PRESETS[value_of("--preset", words, PRESETS) or "27m"])
        arms, experiment = _LANGUAGE_ARMS, LanguageExperiment
    elif kind == _ARC_DECODER:
        form, read = _run_form(DECODERS[value_of("--preset", words, DECODERS) or _ARC_DECODER], ArcDecoderExperiment)
        arms, experiment = _LANGUAGE_ARMS, ArcDecoderExperiment
    else:
        default = defaults_in([*words, "--task.kind", kind])
        model = dataclasses.replace(default.model, streams=max(default.model.streams, 4))
        form, read = _run_form(dataclasses.replace(default, model=model), RecursiveExperiment, "seed")
        arms, experiment = Comparison.arms, RecursiveExperiment
    parse_and_call(compare_with_form(form, read, arms, experiment), "jpmhc compare", words)


def compare_with_form(
    experiment_form: Form, read: Reader, arms: tuple[str, ...], experiment: type[Experiment]
) -> Callable[..., None]:
    """Return the function of `jpmhc compare` for one task, with the options in a form and the default `arms`.

    `read` turns the form with the parsed options into an experiment of the class `experiment`.
    """
    own: Any = Annotated[type(experiment_form), tyro.conf.arg(name="")]
    form = make_option_form(Comparison, experiment=(own, experiment_form), arms=(tuple[str, ...], arms))

    def compare(config: Annotated[type(form), tyro.conf.arg(name="")] = form) -> None:  # type: ignore[valid-type]
        """Train plain and hyper-connected models on one task, with everything else equal, and compare them.

        Example: jpmhc compare language --text docs src --preset tiny --out out/tiny
        Example: jpmhc compare language --preset 27m --learning-rates 2e-3 3.2e-3 1.2e-3 --seeds 0 1 2 --processes 4
        Example: jpmhc compare language --arms plain cayley cayley:streams=2 cayley:read=sigmoid
        Example: jpmhc compare sudoku --task.size 6 --steps 1000 --out out/sudoku6
        Example: jpmhc compare arc-decoder --arms plain cayley cayley:epochs=70 --seeds 0 1 --minutes 30

        The first word is the task: language (the default, a decoder that learns text), arc-decoder (a decoder that
        learns ARC and answers its evaluation puzzles), sudoku or arc (the recursive model). With one seed all arms see
        the same data in the same order and start from the same weights outside their connections. The first seed is
        trained with all learning rates, other seeds with each arm's best learning rate. An interrupted command
        continues when it is repeated; arms, rates and seeds can be added later.

        The preset tiny takes a minute on two idle cores. 27m needs a GPU: one run reads 59 million tokens and takes
        about a minute on an H200. A run of 112m reads 150 million tokens and takes about ten minutes.
        """
        from jpmhc.report.comparison import draw_comparison, format_table, render_comparison
        from jpmhc.report.page import write_page

        for arm in (*config.arms, *config.baselines):  # before the data are prepared
            experiment.split_arm(arm)
        with Display() as display:
            comparison = read_option_form(config, experiment=read(config.experiment, display.say))

            def show(job: Job, progress: Progress) -> None:
                detail = None if progress.loss is None else f"loss {progress.loss:.3f}"
                display.show(str(job), progress.step, progress.steps, detail)
                if progress.step == progress.steps:
                    display.finish(str(job))

            result = train_and_compare(comparison, show, display.say)
        table, out = format_table(result), config.out
        print(table)
        write_file(out / "comparison.md", table + "\n")
        draw_comparison(result, out / "comparison.png")
        print(f"wrote {out / 'comparison.json'}, {out / 'comparison.md'} and {out / 'comparison.png'}")
        print(f"wrote {write_page(render_comparison(result), out / 'comparison.html')}")

    return compare


@dataclasses.dataclass(frozen=True)
class _Text:
    """The options that choose the training text."""

    text: tuple[Path, ...] = ()
    """Folders with text, or one token folder; by default the Python source of this environment."""
    cache: Path = Path("out/tokens")  # Folder in which token folders are made.
    vocabulary: int | None = None  # Number of different tokens; by default 16,384, and fewer for a small text.
    limit: int | None = None  # Stop reading text after about this many tokens.


def _language_form(default: LanguageExperiment) -> tuple[Form, Reader]:
    preset: Any = Annotated[Literal[tuple(PRESETS)], tyro.conf.arg(help="Size of the model and of its training.")]
    form = make_option_form(
        default,
        preset=(preset, next(name for name, known in PRESETS.items() if known is default)),
        text=(Annotated[_Text, tyro.conf.arg(name="")], _Text()),
        model=model_field(default.model, **_fixed(default.model, "mixer", "extra_inner", "vocabulary")),
        **_fixed(default, "tokens", "lr"),
    )

    def read(run: Form, say: Say) -> Experiment:
        text: _Text = run.text
        tokens = prepare_tokens(text.text, text.cache, vocabulary=text.vocabulary, limit=text.limit, say=say)
        experiment: LanguageExperiment = read_option_form(run, tokens=tokens)
        return experiment

    return form, read


def _run_form(
    default: TrainConfig | ArcDecoderRun, experiment: type[ArcDecoderExperiment | RecursiveExperiment], *task: str
) -> tuple[Form, Reader]:
    """Return the form of a run that an experiment repeats, and the function that makes the experiment from the form.

    The settings that the experiment decides, and the settings `task` of the run's task, are not options of the form.
    """
    own = [name for name in experiment.decided if name != "preset"]
    form = make_run_form(
        default, _fixed(default.task, *task), _fixed(default.model, "mixer"), **_fixed(default, *own, "lr")
    )
    return form, lambda run, say: experiment(read_option_form(run))


def _fixed(default: object, *names: str) -> dict[str, Field]:
    """Return form fields with the values of `default` that are no options, because a comparison sets them itself."""
    return {name: (Annotated[Any, tyro.conf.Fixed, tyro.conf.Suppress], getattr(default, name)) for name in names}
