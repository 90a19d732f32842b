"""The command `jpmhc report`."""

from pathlib import Path
from typing import Annotated

import tyro

from jpmhc.cli.command import make_main


def report(runs: Annotated[tuple[Path, ...], tyro.conf.Positional], out: Path | None = None) -> None:
    """Write one HTML page about a run of `jpmhc train`, or about several side by side.

    Example: jpmhc report out/cayley
    Example: jpmhc report out/cayley-seed0 out/cayley-seed1 out/sinkhorn-seed0 --out out/comparison.html

    Args:
        runs: Folders of runs; runs that differ only in their seed are drawn as one line with a band.
        out: File of the page; by default report.html in the run's folder, or out/report.html for several runs.
    """
    from jpmhc.report.page import write_page
    from jpmhc.report.run_page import render_runs
    from jpmhc.report.run_record import read_run

    if not runs:
        raise ValueError("name at least one folder of a run to report on")
    page = render_runs([read_run(run) for run in dict.fromkeys(runs)])
    print(f"wrote {write_page(page, out or (runs[0] / 'report.html' if len(runs) == 1 else Path('out/report.html')))}")


main = make_main(report)
