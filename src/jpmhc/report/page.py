"""One self-contained HTML page of sections with charts, tables and text: no script, no network, light and dark."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from jpmhc import __version__
from jpmhc.files import write_file
from jpmhc.report.svg import Axis, Line, draw_lines

# The most bytes of a page.
LARGEST = 3_000_000
# Points of all lines of a chart together, and the most and the fewest of one.
_POINTS, _MOST, _FEWEST = 4000, 600, 60


@dataclass(frozen=True)
class Picture:
    """An SVG picture with its caption.

    Attributes:
        title: What it shows.
        svg: The picture.
        legend: Name, colour and dash of each line.
        note: What a reader should know of it.
        small: Whether several stand in a row, as heat maps do.
        tone: "right", "wrong" or "", for the frame of an answer.
    """

    title: str
    svg: Markup | None
    legend: Sequence[tuple[str, str, str]] = ()
    note: str = ""
    small: bool = False
    tone: str = ""


@dataclass(frozen=True)
class Table:
    """Rows of text under a heading; the first column names the row.

    Attributes:
        heading: The columns' names.
        rows: The cells.
        note: What a reader should know of it.
    """

    heading: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str = ""

    @property
    def long(self) -> set[int]:
        """The columns whose text is long and runs over several lines."""
        return {k for row in self.rows for k, cell in enumerate(row) if k and len(cell) > 30}


@dataclass(frozen=True)
class Folded:
    """Text that is shown when its line is clicked."""

    line: str
    text: str


@dataclass(frozen=True)
class Section:
    """A part of a page: text, tables, pictures and folded text, in this order.

    Attributes:
        title: Its heading.
        text: Paragraphs.
        tables: Tables.
        pictures: Rows of pictures, each with a heading, which may be empty.
        folded: Folded texts.
    """

    title: str
    text: Sequence[str] = ()
    tables: Sequence[Table] = ()
    pictures: Sequence[tuple[str, Sequence[Picture]]] = ()
    folded: Sequence[Folded] = field(default=())


def legend_of(lines: Sequence[Line]) -> list[tuple[str, str, str]]:
    """Return the legend of a chart: nothing for a single line, which the title names."""
    return [(line.name, line.colour, line.dash) for line in lines] if len(lines) > 1 else []


def draw_chart(title: str, lines: Sequence[Line], x: Axis, y: Axis, note: str = "", **options: Any) -> Picture:
    """Draw lines as a picture with title and legend; the more lines, the fewer points each keeps."""
    lost = sum(int(np.sum(~np.isfinite(np.asarray(line.y, dtype=float)))) for line in lines)
    note = " ".join(filter(None, [note, f"{lost} values are not finite: gaps." if lost else ""]))
    points = min(_MOST, max(_FEWEST, _POINTS // max(1, len(lines))))
    svg = draw_lines(lines, x, y, points=points, description=title, **options)
    return Picture(title, svg, legend_of(lines), note)


def render_page(title: str, lead: Sequence[str], sections: Sequence[Section]) -> str:
    """Return the HTML of a page.

    Args:
        title: The heading.
        lead: Lines under it.
        sections: The rest; a section without content is left out.
    """
    kept = [one for one in sections if one.text or one.tables or one.folded or any(row for _, row in one.pictures)]
    return render_template("page.html", title=title, lead=lead, sections=kept)


def render_template(name: str, **values: Any) -> str:
    """Fill a template of this folder; every value is escaped unless it is `Markup`."""
    templates = Environment(loader=PackageLoader("jpmhc.report"), autoescape=True, undefined=StrictUndefined)
    return templates.get_template(name).render(version=__version__, **values)


def write_page(html: str, path: Path) -> Path:
    """Write a page, whose folder is made if need be, and return its path."""
    if path.suffix not in (".html", ".htm"):  # a browser opens a file from disk by its ending
        raise ValueError(f"a page's name must end in .html, got {path}")
    content = html.encode(errors="replace")  # halves of characters, which a damaged name may hold
    if len(content) > LARGEST:
        size = f"{len(content) / 1e6:.1f} MB, more than {LARGEST / 1e6:g}"
        raise ValueError(f"the page would have {size}: name fewer results")
    try:
        return write_file(path, content)
    except OSError as refusal:
        raise ValueError(f"cannot write {path} ({refusal.strerror})") from refusal
