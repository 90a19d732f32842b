"""Write a self-contained HTML page with charts, tables and text, without scripts, for light and dark displays."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from jpmhc import __version__
from jpmhc.files import write_file
from jpmhc.report.charts import Chart, Line, draw_svg, use_page_colours

LARGEST = 3_000_000  # the largest size of a page in bytes


@dataclass(frozen=True)
class Picture:
    """A picture with its caption."""

    title: str
    content: Markup | None  # picture, as SVG, image or table; None for a caption alone
    legend: Mapping[str, Line] | None = None  # lines of a chart by their names; None for other pictures
    note: str = ""  # sentence below the picture
    small: bool = False  # whether the picture is small enough for several pictures in a row, such as a heat map
    tone: str = ""  # colour of an answer's frame: "right", "wrong" or "" for none


@dataclass(frozen=True)
class Table:
    """A table of text with a heading; the first column names the rows."""

    heading: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str = ""  # sentence below the table

    @property
    def long(self) -> set[int]:
        """The indices of columns whose long text may wrap."""
        return {k for row in self.rows for k, cell in enumerate(row) if k and len(cell) > 30}


@dataclass(frozen=True)
class Section:
    """A section of a page, which shows text, tables, charts, pictures and folded texts in this order."""

    title: str
    text: Sequence[str] = ()
    tables: Sequence[Table] = ()
    charts: Sequence[Chart] = ()  # charts; charts without lines are left out
    pictures: Sequence[tuple[str, Sequence[Picture]]] = ()  # rows of pictures, each with a heading, which may be empty
    folded: Sequence[tuple[str, str]] = ()  # lines, each with a longer text that a reader sees after a click

    @property
    def rows(self) -> list[tuple[str, Sequence[Picture]]]:
        """The non-empty rows of pictures with their headings: one row of charts, and then `pictures`."""
        charts = [_show_chart(chart) for chart in self.charts if chart.lines]
        return [row for row in (("", charts), *self.pictures) if row[1]]


def _show_chart(chart: Chart) -> Picture:
    lost = sum(int(np.sum(~np.isfinite(np.asarray(line.y, dtype=float)))) for line in chart.lines)
    note = " ".join(filter(None, [chart.note, f"{lost} values are not finite: gaps." if lost else ""]))
    return Picture(chart.title, draw_svg(chart), chart.legend, note)


def show_matrix(title: str, matrix: Sequence[Sequence[float]], *, logarithmic: bool = False) -> Picture:
    """Return a heat map of a small matrix: positive entries blue, negative entries red, non-finite entries grey.

    If `logarithmic`, positive numbers are coloured by their logarithm, from 10⁻⁴ to the largest number.
    """
    values = np.array(matrix, dtype=float)
    finite = np.isfinite(values)
    top = max(1.0, float(np.abs(values[finite]).max(initial=0.0)))
    shares = np.where(finite, np.abs(values), top / 2) / top
    if logarithmic:
        shares = np.clip(1 + np.log10(np.maximum(shares, 1e-300)) / (4 + math.log10(top)), 0, 1)
    rows = []
    for value_row, share_row in zip(values, shares):
        kinds = np.where(np.isfinite(value_row), np.where(value_row < 0, "negative", "positive"), "lost")
        texts = [_write_entry(value, logarithmic) if len(values) <= 8 else "" for value in value_row]
        rows.append(list(zip(kinds, (f"{85 * share:.0f}" for share in share_row), texts)))
    return Picture(title, Markup(render_template("heat_map.html", rows=rows)), small=True)


def _write_entry(value: float, logarithmic: bool) -> str:
    """Return an entry of a heat map in at most six characters: 0.25, 1.5, 4e-4."""
    if not logarithmic:
        return f"{value:.2f}".replace("-0.00", "0.00")
    small = 0 < abs(value) < 0.01
    return f"{value:.0e}".replace("e-0", "e-").replace("e+0", "e") if small or abs(value) >= 100 else f"{value:.2g}"


def render_page(title: str, lead: Sequence[str], sections: Sequence[Section]) -> str:
    """Return the HTML of a page with a heading, paragraphs below it, and all sections that have content."""
    parts = [(one, one.rows) for one in sections]
    full = [(one, rows) for one, rows in parts if one.text or one.tables or rows or one.folded]
    return render_template("page.html", title=title, lead=lead, sections=full)


@cache
def _templates() -> Environment:
    environment = Environment(loader=PackageLoader("jpmhc.report"), autoescape=True, undefined=StrictUndefined)
    environment.filters["use_page_colours"] = use_page_colours
    return environment


def render_template(name: str, **values: Any) -> str:
    """Fill in a template from the folder `templates`; values are escaped unless they are `Markup`."""
    return _templates().get_template(name).render(version=__version__, **values)


def write_page(html: str, path: Path) -> Path:
    """Write a page and return the file's path; make the file's folder if it is missing."""
    if path.suffix not in (".html", ".htm"):  # a browser recognises a page by its ending
        raise ValueError(f"a page's name must end in .html, got {path}")
    content = html.encode(errors="replace")  # replaces the invalid characters of a damaged file name
    if len(content) > LARGEST:
        size = f"{len(content) / 1e6:.1f} MB, more than {LARGEST / 1e6:g}"
        raise ValueError(f"the page would have {size}: name fewer results")
    try:
        return write_file(path, content)
    except OSError as refusal:
        raise ValueError(f"cannot write {path} ({refusal.strerror})") from refusal
