"""The command `jpmhc recommend`."""

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import tyro

from jpmhc.cli.output import make_folder
from jpmhc.diagnose.recommend import recommend as rank_mixers
from jpmhc.report.recommendation import draw_recommendation, print_recommendation, write_recommendation
from jpmhc.report.spectrum_tables import StageProgress


def main(words: Sequence[str]) -> None:
    """Parse the words after `jpmhc recommend` and run it."""
    tyro.cli(recommend, prog="jpmhc recommend", args=words)


def recommend(
    depth: int = 24,
    streams: int = 4,
    activation: str = "gelu",
    norm: Literal["pre", "post"] = "pre",
    drift: float = 0.1,
    dim: int = 1024,
    ratio: float = 4.0,
    scales: tuple[float, float] = (1.0, 1.0),
    gated: bool = False,
    start_variance: float = 1.0,
    depth_range: tuple[int, ...] = (),
    out: Path = Path("out/recommend"),
) -> None:
    """Rank the mixers for a model of some depth by what the theory says of its gradients.

    Example: jpmhc recommend --depth 48 --streams 4 --activation gelu

    Args:
        depth: How many sublayers the streams pass: two for each block of a transformer.
        streams: Streams n.
        activation: Of the sublayers: gelu, silu, relu, tanh, ...
        norm: A norm before each sublayer (pre), or of every stream after each write (post).
        drift: How far each skip has come from the identity.
        dim: Features per stream, for the costs.
        ratio: Hidden features of a sublayer over its features.
        scales: Variances of the sublayers' two weights times their columns; 0.333 0.333 is PyTorch's default.
        gated: Gated sublayers, as SwiGLU.
        start_variance: Mean square of the embeddings.
        depth_range: Several depths in place of one, for a curve over depth.
        out: Folder for recommendation.png and recommendation.csv.
    """
    make_folder(out)
    depths = sorted(set(depth_range)) or [depth]
    found = []
    with StageProgress(len(depths)) as progress:
        for one in depths:
            progress.show(f"depth {one}")
            answer = rank_mixers(
                one,
                streams,
                activation,
                norm=norm,
                drift=drift,
                dim=dim,
                ratio=ratio,
                scales=scales,
                gated=gated,
                start_variance=start_variance,
            )
            found.append((one, answer))
    for one, answer in found:
        print(f"depth {one}")
        print_recommendation(answer)
    print(f"wrote {draw_recommendation(found, out / 'recommendation.png')}")
    print(f"wrote {write_recommendation(found, out / 'recommendation.csv')}")
