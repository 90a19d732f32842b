"""The command `jpmhc`: parse, call, print."""

import os
import sys
from collections.abc import Callable, Sequence
from json import dumps
from pathlib import Path
from typing import Annotated, Any

import tyro
from rich.console import Console
from rich.progress import Progress

from jpmhc import __version__
from jpmhc.demo import DEFAULT as DEMO
from jpmhc.demo import DemoConfig, possible_mixers
from jpmhc.demo import run as run_demo
from jpmhc.generators.generating_sets import Method, Question, available_cores, carry_out
from jpmhc.generators.generating_sets import plan as plan_search
from jpmhc.generators.walk_spectrum import plain_spectral_gap
from jpmhc.report import demo as demo_report
from jpmhc.report import generators as generator_report
from jpmhc.report import spectra as spectra_report
from jpmhc.report.arc_grids import draw as draw_answers
from jpmhc.report.figures import draw_panel, draw_spectrum
from jpmhc.spectra.panel import PanelConfig
from jpmhc.spectra.panel import panel as draw_cells
from jpmhc.spectra.query import Query, ask, write_curve
from jpmhc.trm.training.config import PRESETS, TrainConfig
from jpmhc.trm.training.evaluation import EvaluateConfig, PredictConfig, evaluate_checkpoints
from jpmhc.trm.training.evaluation import predict as run_prediction
from jpmhc.trm.training.evaluation import summary as evaluation_summary
from jpmhc.trm.training.loop import train as run_training


def demo(config: Annotated[DemoConfig, tyro.conf.arg(name="")] = DEMO, out: Path = Path("out/demo")) -> None:
    """Train a small deep stack with every mixer on a generated task and compare them; about a minute.

    Example: jpmhc demo --depth 48 --out out/deep

    Args:
        config: Sizes.
        out: Folder for the figure.
    """
    prepare(out)
    with Progress(*Progress.get_default_columns(), transient=True) as progress:
        bars = {mixer: progress.add_task(mixer, total=config.steps) for mixer in possible_mixers(config)}
        outcomes = list(run_demo(config, lambda mixer, step: progress.update(bars[mixer], completed=step)))
    Console().print(demo_report.table(outcomes))
    print(f"wrote {demo_report.figure(outcomes, out / 'demo.png')}")


def train_from(default: TrainConfig) -> Callable[[TrainConfig], None]:
    """The command `train` with the defaults of one preset."""

    def train(config: Annotated[TrainConfig, tyro.conf.arg(name="")] = default) -> None:
        """Train the recursive model.

        Example: jpmhc train --preset laptop --mixer cayley --streams 4 --out out/cayley

        Every default below is that of the preset named on the command line (laptop, if none is). Several processes:
        torchrun --nproc-per-node 8 -m jpmhc train --preset paper
        """
        outcome = run_training(config)
        state = "stopped by a signal" if outcome.stopped else "finished"
        if first_process():
            log = config.out / "log.jsonl"
            print(f"{state} after {outcome.step} steps; checkpoint: {outcome.checkpoint}; log: {log}")
        if outcome.stopped:
            sys.exit(128 + outcome.stopped)  # as a shell reports a process that a signal ended: 130 for Ctrl-C

    return train


def evaluate(config: Annotated[EvaluateConfig, tyro.conf.arg(name="")]) -> None:
    """Score checkpoints on held-out puzzles: exact accuracy, and for ARC pass@k by vote of all variants.

    Example: jpmhc evaluate out/laptop
    Example: jpmhc evaluate out/arc-small --variants 32 --out out/evaluation.json

    Several processes: torchrun --nproc-per-node 8 -m jpmhc evaluate out/paper
    """
    found = evaluate_checkpoints(config, print_scores)
    if first_process():
        print(f"wrote {found['choices']['out']}")


def print_scores(found: dict[str, Any]) -> None:
    """One line for every checkpoint, and one for all of them pooled."""
    parts = [(f"{result['checkpoint']}: {result['tests']}", result["metrics"]) for result in found["results"]]
    if found["pooled"] is not None:
        parts.append(("all checkpoints pooled", found["pooled"]))
    for name, metrics in parts:
        print(f"{name}: {evaluation_summary(metrics)}", flush=True)


def predict(config: Annotated[PredictConfig, tyro.conf.arg(name="")]) -> None:
    """Answer ARC tests by vote: a submission file for ARC Prize, and a picture of the grids of the tasks named.

    Example: jpmhc predict out/arc-small --tasks 00576224 009d5c81 --out out/submission.json
    """
    answered, out = run_prediction(config)
    if not first_process():
        return
    print(f"wrote {out} with {len(answered)} answer{'' if len(answered) == 1 else 's'}")
    if config.tasks:
        for picture in draw_answers(answered, out.with_suffix(".png")):
            print(f"wrote {picture}")


def first_process() -> bool:
    """Whether this is the one that speaks, of those that torchrun started."""
    return int(os.environ.get("RANK", "0")) == 0


def preset_in(arguments: Sequence[str]) -> TrainConfig:
    """The preset that arguments name, which decides the defaults of all other options."""
    for word, following in zip(arguments, [*arguments[1:], ""]):
        name = following if word == "--preset" else word.removeprefix("--preset=")
        if word.startswith("--preset") and name in PRESETS:
            return PRESETS[name]
    return PRESETS["laptop"]


def generators(
    streams: int = 4,
    size: int = 6,
    contains_identity: bool = False,
    reversible: bool = False,
    method: Method = "auto",
    workers: int | None = None,
    moves: int | None = None,
    seed: int | None = None,
    state: Path | None = None,
    json: Path | None = None,
) -> None:
    """Find the sets of permutations whose random walk has the largest spectral gap.

    Example: jpmhc generators --streams 5 --size 4 --json out/generators/n5-k4.json

    The file's `perms` is a basis for the permutation mixer. An interrupted search with --state goes on where it was.

    Args:
        streams: Number of streams n, 2 to 8.
        size: Number of permutations in a set.
        contains_identity: Only sets that hold the identity, as a mixer that starts as the plain residual needs.
        reversible: Only sets that hold the inverse of each of their elements.
        method: Look at every class of sets (n up to 7), search locally, or decide by their number.
        workers: Processes of an exhaustive search; every core if not given.
        moves: Sets that a local search looks at; 500,000 if not given.
        seed: Of a local search; 0 if not given.
        state: File in which an exhaustive search keeps what it has done.
        json: File for the result.
    """
    if json is not None:
        prepare(json.parent)
        if json.is_dir():
            raise ValueError(f"--json names a file for the result, and {json} is a folder")
    planned = plan_search(Question(streams, size, contains_identity, reversible), method, moves)
    print(generator_report.cost(planned, workers or available_cores()))
    with generator_report.SearchProgress() as progress:
        result = carry_out(planned, workers=workers, state=state, seed=seed, progress=progress.show)
    plain = plain_spectral_gap(result.perms) if streams <= 6 else None
    generator_report.show(result, plain)
    if json is not None:
        json.write_text(dumps(generator_report.as_record(result, plain), indent=1))
        print(f"wrote {json}")


def spectrum(query: Annotated[Query, tyro.conf.arg(name="")], out: Path = Path("out/spectrum")) -> None:
    """Say what the singular values of a network's end-to-end Jacobian are: a table, a figure and the curve.

    Example: jpmhc spectrum --mixer bistochastic --depth 10 --noise 0.05 --simulate

    Args:
        out: Folder for spectrum.png and spectrum.csv.
    """
    prepare(out)
    with spectra_report.warnings_in_one_line(), spectra_report.StageProgress() as progress:
        answer = ask(query, progress.show)
    spectra_report.show_answer(answer)
    print(f"wrote {draw_spectrum(answer, query.title(answer.network), out / 'spectrum.png')}")
    print(f"wrote {write_curve(answer.density, out / 'spectrum.csv')}")


def panel(config: Annotated[PanelConfig, tyro.conf.arg(name="")], out: Path = Path("out/panel")) -> None:
    """Draw the paper's Figure 1, sampled singular values against theories, and print how far each theory is.

    Example: jpmhc panel --out out/panel

    Args:
        out: Folder for panel.png, panel_log.png (logarithmic axes) and panel.csv.
    """
    prepare(out)
    with spectra_report.StageProgress(len(config.mixers) * len(config.depths)) as progress:
        cells = draw_cells(config, progress.show)
    spectra_report.show_panel(cells)
    print(f"wrote {draw_panel(cells, config.eta, out / 'panel.png')}")
    print(f"wrote {draw_panel(cells, config.eta, out / 'panel_log.png', logarithmic=True)}")
    print(f"wrote {spectra_report.write_panel(cells, out / 'panel.csv')}")


def prepare(folder: Path) -> None:
    """Make the folder for the results before any work is done that could be lost."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as refusal:
        raise ValueError(f"cannot write to {folder} ({refusal.strerror}); name a folder that can be made") from refusal


COMMANDS: dict[str, Callable] = {
    "demo": demo,
    "evaluate": evaluate,
    "generators": generators,
    "panel": panel,
    "predict": predict,
    "spectrum": spectrum,
}


def main(arguments: list[str] | None = None) -> None:
    """Run one command; bad input ends with one sentence on stderr and exit status 2."""
    words = sys.argv[1:] if arguments is None else arguments
    if words == ["--version"]:
        print(f"jpmhc {__version__}")
        return
    commands = COMMANDS | {"train": train_from(preset_in(words))}
    try:
        if words and words[0] in commands:  # by itself, so that mistakes are answered with this command's help
            tyro.cli(commands[words[0]], prog=f"jpmhc {words[0]}", args=words[1:])
        else:
            tyro.extras.subcommand_cli_from_dict(commands, prog="jpmhc", description=__doc__, args=words)
    except (ValueError, OSError) as error:
        print(f"jpmhc: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print("jpmhc: interrupted", file=sys.stderr)
        sys.exit(130)
