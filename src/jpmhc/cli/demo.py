"""The command `jpmhc demo`."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import tyro
from rich.console import Console
from rich.progress import Progress

from jpmhc.cli.output import make_folder
from jpmhc.demo import DEFAULT, DemoConfig, possible_mixers, train_every_mixer
from jpmhc.report.demo import draw_outcomes, tabulate_outcomes


def main(words: Sequence[str]) -> None:
    """Parse the words after `jpmhc demo` and run it."""
    tyro.cli(demo, prog="jpmhc demo", args=words)


def demo(config: Annotated[DemoConfig, tyro.conf.arg(name="")] = DEFAULT, out: Path = Path("out/demo")) -> None:
    """Train a small deep stack with every mixer on a generated task and compare them; about a minute.

    Example: jpmhc demo --depth 48 --out out/deep

    Args:
        config: Sizes.
        out: Folder for the figure.
    """
    make_folder(out)
    with Progress(*Progress.get_default_columns(), transient=True) as progress:
        bars = {mixer: progress.add_task(mixer, total=config.steps) for mixer in possible_mixers(config)}
        outcomes = list(train_every_mixer(config, lambda mixer, step: progress.update(bars[mixer], completed=step)))
    Console().print(tabulate_outcomes(outcomes))
    print(f"wrote {draw_outcomes(outcomes, out / 'demo.png')}")
