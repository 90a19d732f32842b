"""How shared modes grow, and whether a law that knows less than the modes themselves would do.

    python benchmarks/check_modes.py

takes about fifteen minutes on one core. MLP stacks on a fixed random function and language models of `jpmhc compare
language --preset tiny` are trained with several depths, learning rates and mixers:
benchmarks/results/modes_growth.csv and docs/results/modes_growth.png. Cases that the file has are not trained again.
In trained MLP stacks the modes are then kept as they are, rotated each by itself as a similarity (its own law is kept,
the joint law of the modes is lost), or rotated on both sides (its singular values and the Gram matrix over layers are
kept alone): benchmarks/results/modes_law.csv.
"""

import argparse
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from matplotlib import colormaps
from matplotlib.figure import Figure
from torch import Tensor

import jpmhc
from check_trained import Stage, describe, train_language, train_mlp
from harness import read_csv, write_csv
from jpmhc.diagnose.methods import spectrum_of
from jpmhc.diagnose.shared_modes import find_modes, multiply_all, split_shared
from jpmhc.diagnose.spectrum import Spectrum
from jpmhc.diagnose.theory import compose_layers, kolmogorov_distance, rotate_sublayers
from jpmhc.experiments.comparison.experiment import PLAIN
from jpmhc.experiments.comparison.language import PRESETS
from jpmhc.manifolds import orthogonal
from jpmhc.report.style import INK, finish_axes

FIGURE = Path(__file__).parent.parent / "docs" / "results" / "modes_growth.png"
Layers = list[tuple[Tensor, Tensor, Tensor]]


class Case(NamedTuple):
    """One network that is trained: its kind, its connections, its number of sublayers, and its training."""

    network: str
    arm: str
    depth: int
    rate: float
    steps: int

    def train(self) -> Iterator[Stage]:
        """Train the network; yield it at the start, after a quarter and at the end."""
        if self.network == "mlp":
            return train_mlp(self.arm, 48, self.depth, self.rate, self.steps)
        model = replace(TINY.model, layers=self.depth // 2)
        return train_language(replace(TINY, steps=self.steps, model=model), self.arm, self.rate)


TINY = PRESETS["tiny"]
CASES = [
    *(Case("mlp", PLAIN, depth, 2e-3, 80) for depth in (4, 8, 16, 32, 64)),
    *(Case("mlp", PLAIN, 16, rate, 80) for rate in (2.5e-4, 1e-3, 4e-3)),
    Case("mlp", PLAIN, 16, 2e-3, 320),
    *(Case("language", PLAIN, 8, rate, TINY.steps) for rate in (7.5e-4, 3e-3, 1.2e-2)),
    *(Case("language", PLAIN, depth, 3e-3, TINY.steps) for depth in (4, 16)),
    *(Case("language", arm, 8, 3e-3, TINY.steps) for arm in ("rotation", "cayley", "sinkhorn", "identity")),
]


def read_growth() -> dict[Case, list[dict[str, Any]]]:
    """Return the stored measurements of the cases that are finished."""
    stored: dict[Case, list[dict[str, Any]]] = {}
    for row in read_csv("modes_growth"):
        case = Case(row["network"], row["arm"], int(row["depth"]), float(row["rate"]), int(row["steps"]))
        stored.setdefault(case, []).append(row)
    return stored


def measure_growth() -> None:
    """Train the networks that are not stored yet; print and save how their modes grow."""
    stored = read_growth()
    for case in CASES:
        if case in stored:
            continue
        rows = stored[case] = []
        for stage in case.train():
            diagnosis = jpmhc.diagnose(stage.network, stage.inputs, tokens=1, probes=2, steps=8, seconds=6000, say=None)
            numbers = describe(diagnosis)
            names = ("modes", "outlier", "limit", "share", "t_ks_free", "t_ks_modes")
            rows.append(
                case._asdict() | {"step": stage.step, "loss": stage.loss} | {name: numbers[name] for name in names}
            )
            print({name: round(v, 4) if isinstance(v, float) else v for name, v in rows[-1].items()}, flush=True)
        write_csv("modes_growth", [row for known in CASES for row in stored.get(known, [])])


def draw_growth() -> None:
    """Draw the stored growth: the largest eigenvalue and KS, at the start, after a quarter and at the end."""
    stored = read_growth()
    figure = Figure(figsize=(10, 7), layout="constrained")
    axes = figure.subplots(2, 2, sharex=True, sharey="row")
    for column, network in enumerate(("mlp", "language")):
        eigenvalues, distances = axes[:, column]
        cases = [case for case in CASES if case.network == network and case in stored]
        for number, case in enumerate(cases):
            colour = colormaps["viridis"](number / (len(cases) - 1))
            label = f"{case.arm}, {case.depth} layers, rate {case.rate:g}, {case.steps} steps"
            rows = stored[case]
            heights = [float(row["outlier"]) / float(row["limit"]) for row in rows]
            eigenvalues.plot(range(3), heights, color=colour, marker="o", ms=3, lw=1.4, label=label)
            for name, style in (("t_ks_free", "-"), ("t_ks_modes", ":")):
                values = [float(row[name]) for row in rows]
                distances.plot(range(3), values, style, color=colour, marker="o", ms=3, lw=1.4)
        eigenvalues.axhline(1, color=INK, lw=0.8, ls="--")
        eigenvalues.set_title("MLP stacks" if network == "mlp" else "language models", fontsize=10)
        eigenvalues.legend(fontsize=7, loc="upper left")
        finish_axes(eigenvalues)
        finish_axes(distances)
        distances.set_xticks(range(3), ("start", "quarter", "end"))
    axes[0, 0].set_ylim(0, 7)
    axes[0, 0].set_ylabel("largest eigenvalue over the limit of a shared mode", fontsize=9)
    axes[1, 0].set_ylabel("KS of T: free (solid), with modes (dotted)", fontsize=9)
    figure.savefig(FIGURE, dpi=90)
    print(f"wrote {FIGURE}")


def split_layers(network: torch.nn.Module, x: Tensor) -> tuple[Layers, list[Tensor]]:
    """Return the layers of a plain stack at one input: multiples of the identity, and the rests as matrices."""
    one = torch.ones(1, dtype=torch.float64)
    layers, matrices = [], []
    for layer in network.children():
        matrix = torch.autograd.functional.jacobian(layer, x).double()
        skip = torch.linalg.eigvalsh((matrix + matrix.mT) / 2).quantile(0.5)
        layers.append((one, one, skip.view(1, 1)))
        matrices.append(matrix - skip * torch.eye(len(matrix), dtype=torch.float64))
        x = layer(x).detach()
    return layers, matrices


def draw_layers(
    layers: Layers, own: Tensor, directions: Tensor, patterns: Tensor, how: str, generator: torch.Generator
) -> Spectrum:
    """Return the spectrum with own parts rotated freely and the modes kept, or rotated in one of two ways."""
    width = own.shape[-1]

    def rotation() -> Tensor:
        return orthogonal.sample(width, generator=generator)

    if how == "similar":
        frames = [rotation() for _ in patterns]
        patterns = torch.stack([frame @ pattern @ frame.mT for frame, pattern in zip(frames, patterns)])
    elif how == "both sides":
        patterns = torch.stack([rotation() @ pattern @ rotation() for pattern in patterns])
    shared = torch.einsum("lk,kij->lij", directions, patterns)
    return spectrum_of(
        compose_layers(layers, [part + rotation() @ rest @ rotation() for part, rest in zip(shared, own)])
    )


def measure_law() -> None:
    """Compare the modes as they are with modes of which less is known; print and save the KS distances."""
    rows = []
    for dim, depth in ((64, 12), (96, 24), (32, 48)):
        *_, stage = train_mlp(PLAIN, dim, depth)
        layers, matrices = split_layers(stage.network, stage.inputs[0, 0])
        exact = spectrum_of(compose_layers(layers, matrices))
        stack = torch.stack(matrices)
        modes = find_modes(multiply_all(stack), dim**2)
        own = torch.stack([rest for _, rest in split_shared(matrices, modes)])
        sizes = stack.flatten(1).norm(dim=1)[:, None]
        patterns = torch.einsum("lk,lij->kij", modes.directions / sizes, stack)
        row = {"dim": dim, "depth": depth, "modes": modes.count, "share": modes.share}
        row["free"] = kolmogorov_distance(exact, rotate_sublayers(layers, matrices, 0)[0])
        for how in ("kept", "similar", "both sides"):
            generator = torch.Generator().manual_seed(1)
            drawn = [draw_layers(layers, own, sizes * modes.directions, patterns, how, generator) for _ in range(8)]
            row[how] = sum(kolmogorov_distance(exact, spectrum) for spectrum in drawn) / len(drawn)
        # zero for a matrix whose law does not change when it is rotated on both sides
        row["tr P² / |P|²"] = float((patterns[0] * patterns[0].mT).sum() / patterns[0].square().sum())
        rows.append(row)
        print({name: round(value, 3) for name, value in row.items()}, flush=True)
    write_csv("modes_law", rows)


def main() -> None:
    """Read the command's options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draw", action="store_true", help="only draw the stored growth")
    if parser.parse_args().draw:
        draw_growth()
        return
    torch.set_num_threads(1)
    measure_law()
    measure_growth()
    draw_growth()


if __name__ == "__main__":
    main()
