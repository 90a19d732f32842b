"""The command `jpmhc panel`."""

from pathlib import Path
from typing import Annotated

import tyro

from jpmhc.cli.command import make_main
from jpmhc.experiments.training.progress import Display
from jpmhc.files import require_writable
from jpmhc.paper.panel import PanelConfig
from jpmhc.paper.panel import panel as compute_cells


def panel(
    config: Annotated[PanelConfig, tyro.conf.arg(name="")], out: Path = Path("out/panel"), kernel: bool = False
) -> None:
    """Draw the paper's Figure 1: sampled singular values, and how far each theory is from them.

    Example: jpmhc panel --out out/panel
    Example: jpmhc panel --grid x --kernel --mixers identity bistochastic orthogonal --out out/panel-x

    Args:
        out: Folder for panel.png, panel_log.png (logarithmic axes) and panel.csv.
        kernel: Also draw a Gaussian kernel estimate of the sampled singular values.
    """
    from jpmhc.report.panel import draw_panel, print_panel, write_panel

    require_writable(out / "panel.png")
    with Display() as display:
        cells = compute_cells(config, display.counting("cells", len(config.mixers) * len(config.depths)))
    print_panel(cells)
    print(f"wrote {draw_panel(cells, config.eta, out / 'panel.png', kernel=kernel)}")
    print(f"wrote {draw_panel(cells, config.eta, out / 'panel_log.png', logarithmic=True, kernel=kernel)}")
    print(f"wrote {write_panel(cells, out / 'panel.csv')}")


main = make_main(panel)
