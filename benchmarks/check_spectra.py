"""How accurate the theory is: the chain against sampled networks, and the paper's methods against the chain.

The simulation is written here and shares no code with the package: skips, noise and eigenvalues are its own.
Finished cases are kept in the CSV file, so that an interrupted run continues where it stopped.

Examples:
    python benchmarks/check_spectra.py accuracy
    python benchmarks/check_spectra.py width
    python benchmarks/check_spectra.py methods
    python benchmarks/check_spectra.py accuracy --depths 2 5 --device cuda
"""

import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import tyro

from harness import read_csv, write_csv, write_table
from jpmhc import paper, spectra

X = np.array([0.02, 0.05, 0.1, 0.2, 0.35, 0.5, 0.75, 1.0, 1.5, 2.0])
ETA = 0.05
STREAMS = 4
WIDTH = 250  # features per stream of sampled networks
LEAST, MOST = 20, 400  # networks per case
TARGET = 0.0025  # relative standard error of the simulation at which a case is done
PAGE = Path(__file__).parent.parent / "docs" / "results" / "prediction.md"


def bistochastic(rng: np.random.Generator) -> np.ndarray:
    matrix = np.exp(rng.normal(size=(STREAMS, STREAMS)))
    for _ in range(500):
        matrix /= matrix.sum(1, keepdims=True)
        matrix /= matrix.sum(0, keepdims=True)
    return matrix


def gaussian(rng: np.random.Generator) -> np.ndarray:
    return rng.normal(size=(STREAMS, STREAMS)) / np.sqrt(STREAMS)


def projector(rng: np.random.Generator) -> np.ndarray:
    frame, _ = np.linalg.qr(rng.normal(size=(STREAMS, STREAMS // 2)))
    return frame @ frame.T


def orthogonal(rng: np.random.Generator) -> np.ndarray:
    return np.linalg.qr(rng.normal(size=(STREAMS, STREAMS)))[0]


MIXERS = {"bistochastic": bistochastic, "Gaussian": gaussian, "projector": projector, "orthogonal": orthogonal}


def skips(mixer: str, depth: int, repeated: bool = False) -> np.ndarray:
    """[L, n, n]; "mixed" takes its layers from all kinds in turn, so that no two neighbours commute."""
    rng = np.random.default_rng(depth)
    if mixer == "mixed":
        kinds = [bistochastic, orthogonal, gaussian, projector]
        return np.stack([1.1 * kinds[layer % 4](rng) for layer in range(depth)])
    if repeated:
        return np.stack([MIXERS[mixer](rng)] * depth)
    return np.stack([MIXERS[mixer](rng) for _ in range(depth)])


def vectors(depth: int) -> tuple[np.ndarray, np.ndarray]:
    """Read vectors that sum to one, write vectors around one. [L, n] each"""
    rng = np.random.default_rng(1000 + depth)
    read = rng.uniform(0.1, 1, size=(depth, STREAMS))
    return read / read.sum(1, keepdims=True), rng.uniform(0.5, 1.5, size=(depth, STREAMS))


@dataclass(frozen=True)
class Case:
    mixer: str
    depth: int
    total: float  # L σ²
    noise: Literal["isotropic", "block"]

    def network(self) -> spectra.Network:
        read, write = vectors(self.depth) if self.noise == "block" else (None, None)
        return spectra.Network(skips(self.mixer, self.depth), self.total / self.depth, read, write)

    def sample(self, width: int, count: int, generator: torch.Generator) -> torch.Tensor:
        """Eigenvalues of JᵀJ of sampled networks. [count, N]"""
        device = generator.device
        layers = torch.tensor(skips(self.mixer, self.depth), device=device)
        read, write = (torch.tensor(part, device=device) for part in vectors(self.depth))
        scale = (self.total / self.depth) ** 0.5
        size = STREAMS * width

        def gaussian_matrix(n: int) -> torch.Tensor:
            return torch.randn(count, n, n, dtype=torch.float64, device=device, generator=generator) / n**0.5

        jacobian = torch.eye(size, dtype=torch.float64, device=device).expand(count, size, size)
        for layer, skip in enumerate(layers):
            streams = jacobian.reshape(count, STREAMS, width * size)
            mixed = (skip @ streams).reshape(count, size, size)  # A ⊗ I_p
            if self.noise == "isotropic":
                noise = gaussian_matrix(size) @ jacobian
            else:
                seen = gaussian_matrix(width) @ (read[layer] @ streams).reshape(count, width, size)
                noise = (write[layer][:, None, None] * seen[:, None]).reshape(count, size, size)
            jacobian = mixed + scale * noise
        return torch.linalg.eigvalsh(jacobian.mT @ jacobian)


def measure(case: Case, device: str) -> dict[str, object]:
    """Sample until the simulation's own standard error is below `TARGET` at all points, then compare."""
    z = torch.tensor(X + 1j * ETA, device=device)
    generator = torch.Generator(device).manual_seed(7)
    values = torch.empty(0, len(X), dtype=torch.complex128, device=device)
    while True:
        eigenvalues = case.sample(WIDTH, LEAST if device == "cuda" else 4, generator)
        values = torch.cat([values, (1 / (z[:, None] - eigenvalues[:, None, :])).mean(-1)])
        count, truth = len(values), values.mean(0)
        error = ((values - truth).abs().square().sum(0) / (count - 1) / count).sqrt() / truth.abs()
        if count >= MOST or (count >= LEAST and float(error.max()) < TARGET):
            break
    found = spectra.cauchy(case.network(), z.cpu())
    if not bool(found.converged.all()):
        raise RuntimeError(f"{case}: the chain did not converge at {int((~found.converged).sum())} points")
    miss = ((found.G.to(device) - truth) / truth).abs()
    return {
        "mixer": case.mixer,
        "noise": case.noise,
        "depth": case.depth,
        "total_variance": case.total,
        "width": STREAMS * WIDTH,
        "samples": count,
        "median_error": float(miss.median()),
        "largest_error": float(miss.max()),
        "largest_standard_error": float(error.max()),
    }


def accuracy(depths: tuple[int, ...] = (2, 5, 10, 50), device: str = "cpu") -> None:
    """The chain against sampled networks, all kinds of skips, both structures of noise.

    Args:
        depths: Numbers of layers.
        device: Where to sample.
    """
    rows = read_csv("spectra_accuracy")
    done = {(row["mixer"], row["noise"], int(row["depth"]), float(row["total_variance"])) for row in rows}
    cases = [
        Case(mixer, depth, total, noise)
        for depth in depths
        for noise in ("isotropic", "block")
        for mixer in ("bistochastic", "Gaussian", "projector", "mixed")
        for total in (0.05, 1.0)
    ]
    left = [c for c in cases if (c.mixer, c.noise, c.depth, c.total) not in done]
    for number, case in enumerate(left, 1):
        rows.append(measure(case, device))
        message = "largest error {largest_error:.2%}, simulation {largest_standard_error:.2%}, {samples} samples"
        print(f"{number}/{len(left)} {case}: {message.format(**rows[-1])}", flush=True)
        write_csv("spectra_accuracy", rows, device)
    write_table(PAGE, "accuracy", list_largest(rows))


def list_largest(rows: list[dict[str, Any]]) -> list[str]:
    """Return the largest errors over the depths, one line for each kind of skips and noise."""
    lines = [
        "| skips | noise | largest, Lσ² = 0.05 | median | simulation | largest, Lσ² = 1 | median | simulation |",
        "|---|---|---|---|---|---|---|---|",
    ]
    keys = ("largest_error", "median_error", "largest_standard_error")
    for mixer, noise in sorted({(row["mixer"], row["noise"]) for row in rows}):
        cells = []
        for total in (0.05, 1.0):
            case = (mixer, noise, total)
            same = [row for row in rows if (row["mixer"], row["noise"], float(row["total_variance"])) == case]
            cells += [f"{max(float(row[key]) for row in same):.2%}" for key in keys]
        lines.append(f"| {mixer} | {noise} | " + " | ".join(cells) + " |")
    return lines


def width() -> None:
    """How the simulation's own bias falls with its width, where the chain and the simulation differ most.

    The standard error of a simulation says nothing of what its finite width does to the mean.
    """
    z = torch.tensor(X + 1j * ETA)
    rows: list[dict[str, object]] = []
    case = Case("bistochastic", 2, 0.05, "isotropic")
    truth = spectra.cauchy(case.network(), z, tolerance=1e-12).G
    for features, count in {15: 6000, 30: 3000, 60: 1200, 125: 400, 250: 300}.items():
        generator = torch.Generator().manual_seed(11)  # not that of `accuracy`
        batch = max(1, 1500 // features)
        parts = []
        for start in range(0, count, batch):
            eigenvalues = case.sample(features, min(batch, count - start), generator)
            parts.append((1 / (z[:, None] - eigenvalues[:, None, :])).mean(-1))
        values = torch.cat(parts)
        mean = values.mean(0)
        error = ((values - mean).abs().square().sum(0) / (count - 1) / count).sqrt() / truth.abs()
        miss = ((mean - truth) / truth).abs()
        worst = int(miss.argmax())
        size = STREAMS * features
        rows.append(
            {
                "width": size,
                "samples": count,
                "x": X[worst],
                "largest_error": float(miss[worst]),
                "standard_error_there": float(error[worst]),
                "width_times_error": size * float(miss[worst]),
            }
        )
        print(" ".join(f"{key} {value:.4g}" for key, value in rows[-1].items()), flush=True)
    write_csv("spectra_width", rows)


def methods() -> None:
    """The paper's methods against the chain: relative deviation of G(x + 0.02i) at 100 points from 0.001 to 10."""
    z = torch.logspace(-3, 1, 100, dtype=torch.float64) + 0.02j
    rows = []
    for mixer in ("orthogonal", "bistochastic", "Gaussian"):
        for depth in (2, 3, 5, 10):
            for total in (0.05, 1.0):
                network = spectra.Network(skips(mixer, depth), total / depth)
                truth = spectra.cauchy(network, z, tolerance=1e-11)
                for method in ("twisted", "twisted-paper", "subordination"):
                    with warnings.catch_warnings():
                        warnings.simplefilter("ignore", UserWarning)
                        found = paper.cauchy(network, z, method)
                    both = found.converged & truth.converged
                    miss = ((found.G - truth.G).abs() / truth.G.abs())[both]
                    rows.append(
                        {
                            "mixer": mixer,
                            "depth": depth,
                            "total_variance": total,
                            "method": method,
                            "exact": found.exact,
                            "converged": int(both.sum()),
                            "median": float(miss.median()),
                            "largest": float(miss.max()),
                        }
                    )
                    print("{mixer:13s} L={depth:<3d} Lσ²={total_variance:<5g} {method:15s} ".format(**rows[-1]), end="")
                    print("median {median:.1e}  largest {largest:.1e}  converged {converged}".format(**rows[-1]))
    write_csv("spectra_methods", rows)


if __name__ == "__main__":
    tyro.extras.subcommand_cli_from_dict({"accuracy": accuracy, "width": width, "methods": methods})
