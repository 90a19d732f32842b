"""The command `jpmhc explore`."""

from importlib.resources import as_file, files
from pathlib import Path

from jpmhc.cli.command import make_main


def explore(out: Path = Path("out/explore.html")) -> None:
    """Write a page with sliders that show what mixer, depth, noise, activation and norm do to gradients.

    Example: jpmhc explore --out out/explore.html

    Args:
        out: File of the page, which needs no network.
    """
    from jpmhc.report.explorer import read_atlas, render_explorer
    from jpmhc.report.page import write_page

    with as_file(files("jpmhc.report") / "atlas.npz") as path:
        atlas = read_atlas(path)
    print(f"wrote {write_page(render_explorer(atlas), out)}")


main = make_main(explore)
