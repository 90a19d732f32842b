"""The command `jpmhc recommend`."""

from collections.abc import Callable
from pathlib import Path

from jpmhc import checks
from jpmhc.cli.command import make_main, options_of
from jpmhc.diagnose.recommend import Candidate
from jpmhc.diagnose.recommend import recommend as rank_mixers
from jpmhc.experiments.training.progress import Display
from jpmhc.files import require_writable
from jpmhc.spectra import Density, density

# The smoothing of the drawn spectra, relative to the squared singular value.
_SMOOTHING = 0.01
# The arguments of `rank_mixers` that are options under the same names.
_OPTIONS = ("streams", "norm", "dim", "ratio", "scales", "gated", "start_variance")
# Progress is shown for depths above this, whose computation takes long.
_LONG = 200


def recommend(
    options: options_of(rank_mixers, *_OPTIONS),  # type: ignore[valid-type]
    depth: int = 24,
    mixers: tuple[str, ...] = (),
    activation: str = "gelu",
    drift: float = 0.1,
    depth_range: tuple[int, ...] = (),
    spectra: int = 0,
    out: Path = Path("out/recommend"),
) -> None:
    """Rank the mixers for a model of a given depth by the gradients that the theory predicts.

    Example: jpmhc recommend --depth 48 --streams 4 --activation gelu
    Example: jpmhc recommend --mixers cayley my_mixers:Shrinking --activation my_activations:SQUARED_RELU

    Args:
        depth: Number of sublayers: two for each block of a transformer.
        mixers: Names of mixers, or MODULE:CLASS for a mixer of your own; by default all names.
        activation: The sublayers' activation: gelu, silu, relu, tanh, ..., or MODULE:NAME for a spectra.Activation.
        drift: Distance by which each skip is moved from the identity to imitate training: at most 1.
        depth_range: Several depths instead of --depth, for a curve over depth.
        spectra: Draw the predicted spectra of this many of the best mixers at the last depth; up to a minute each.
        out: Folder for recommendation.png and recommendation.csv.
    """
    from jpmhc.report.recommendation import (
        draw_spectra,
        plot_recommendations,
        print_recommendations,
        write_recommendation,
    )
    from jpmhc.report.style import save_figure

    depths = sorted(set(depth_range)) or [depth]
    checks.whole_number(spectra, "spectra", least=0)
    checks.whole_number(depths[0], "depth")
    ranked = []
    require_writable(out / "recommendation.png")
    with Display() as display:
        show = display.counting("depths", len(depths))
        for one in depths:
            if len(depths) > 1 or one > _LONG:
                show(f"depth {one}")
            answer = rank_mixers(one, activation=activation, drift=drift, mixers=mixers or None, **options)
            ranked.append((one, answer))
    print_recommendations(ranked)
    if spectra:
        chosen = ranked[-1][1].candidates[:spectra]
        with Display() as display:
            show = display.counting("spectra", len(chosen))
            curves = {one.mixer: _predict_spectra(one, show) for one in chosen}
        print(f"wrote {draw_spectra(curves, out / 'spectra.png')}")
    print(f"wrote {save_figure(plot_recommendations(ranked), out / 'recommendation.png')}")
    print(f"wrote {write_recommendation(ranked, out / 'recommendation.csv')}")


main = make_main(recommend)


def _predict_spectra(one: Candidate, show: Callable[[str], None]) -> dict[str, Density]:
    """Return the predicted singular value densities of J with fresh skips, and of J and T with drifted skips, by name.

    `Candidate` defines J, T and drifted skips. `show` is called with the mixer's name.
    """
    show(one.mixer)
    networks = {"J at the start": one.fresh_network, "J drifted": one.network, "T drifted": one.network.end_to_end()}
    return {name: density(network, relative_eta=_SMOOTHING) for name, network in networks.items()}
