"""The command `jpmhc demo`."""

from pathlib import Path
from typing import Annotated

import tyro
from rich.console import Console

from jpmhc.cli.command import make_main
from jpmhc.experiments.demo import DEFAULT, DemoConfig, run_demo
from jpmhc.experiments.training.progress import Display
from jpmhc.files import require_writable


def demo(config: Annotated[DemoConfig, tyro.conf.arg(name="")] = DEFAULT, out: Path = Path("out/demo")) -> None:
    """Train a deep stack as a plain residual network and with mixers, and compare; two minutes.

    Example: jpmhc demo --mixers rotation mhc_lite --depth 24 --out out/mine

    Args:
        config: The models and their training.
        out: Folder for the page.
    """
    from jpmhc.report.demo import sum_up, tabulate_outcomes, write_demo_page

    require_writable(out / "demo.html")
    with Display() as display:
        display.say(f"training {config.title}")
        outcomes = run_demo(config, lambda name, done, of: display.show("runs", done, of, name))
    Console().print(tabulate_outcomes(outcomes, config))
    print("\n".join(sum_up(outcomes, config)))
    print(f"\nopen {write_demo_page(outcomes, config, out / 'demo.html')} in a browser")


main = make_main(demo)
