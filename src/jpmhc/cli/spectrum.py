"""The command `jpmhc spectrum`."""

from pathlib import Path
from typing import Annotated

import tyro

from jpmhc.cli.command import make_main
from jpmhc.cli.output import result_folder
from jpmhc.spectra.query import MIXER, Query, answer_query, write_curve


def spectrum(query: Annotated[Query, tyro.conf.arg(name="")], out: Path = Path("out/spectrum")) -> None:
    """Predict the singular values of a deep network's Jacobian: a table, a figure and the curve.

    Example: jpmhc spectrum --mixer sinkhorn --depth 10 --noise 0.05 --simulate

    Args:
        out: Folder for spectrum.png and spectrum.csv.
    """
    from jpmhc.report.progress import StageProgress, warnings_in_one_line
    from jpmhc.report.spectrum_figures import draw_spectrum
    from jpmhc.report.spectrum_tables import print_answer
    from jpmhc.report.style import EXACT, colour_of

    with result_folder(out), warnings_in_one_line(), StageProgress() as progress:
        answer = answer_query(query, progress.show)
    print_answer(answer)
    colour = EXACT if query.matrix is not None else colour_of(query.mixer or MIXER)
    print(f"wrote {draw_spectrum(answer, query.title(answer.network), out / 'spectrum.png', colour)}")
    print(f"wrote {write_curve(answer.density, out / 'spectrum.csv')}")


main = make_main(spectrum)
