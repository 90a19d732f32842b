"""Do the error bars of Lanczos quadrature hold? Their coverage over seeds, for matrices with known singular values.

    python benchmarks/check_error_bars.py

takes two minutes on one core and writes benchmarks/results/error_bars.csv.
"""

import numpy as np
import torch
from torch import Tensor

from harness import write_csv
from jpmhc.diagnose import Spectrum
from jpmhc.diagnose.jacobian import Jacobian, linearise
from jpmhc.diagnose.methods import measure_quadrature

SIZE, SEEDS, PROBES = 400, 20, 4
STATISTICS = {
    "below 0.1": Spectrum.below,
    "5 % quantile": lambda spectrum: spectrum.quantile(0.05),
    "median": lambda spectrum: spectrum.quantile(0.5),
    "mean square": Spectrum.mean_square,
    "geometric mean": Spectrum.geometric_mean,
}


def make_spectra(generator: torch.Generator) -> dict[str, Tensor]:
    """Return singular values: narrow, narrow around the threshold, log-normal, and collapsed in two ways."""

    def normal() -> Tensor:
        return torch.randn(SIZE, dtype=torch.float64, generator=generator)

    tenth = torch.arange(SIZE) < SIZE // 10
    return {
        "log-normal(0.3)": (0.3 * normal()).exp(),
        "0.12 log-normal(0.3)": 0.12 * (0.3 * normal()).exp(),
        "log-normal(2)": (2 * normal()).exp(),
        "a tenth at 1e-9": torch.where(tenth, 1e-9, (0.5 * normal()).exp()),
        "a tenth near 0.01": torch.where(tenth, 0.01 * normal().exp(), normal().exp()),
    }


def main() -> None:
    """Print and save how many of the seeds' error bars contain the truth."""
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(0)
    rows = []
    for name, values in make_spectra(generator).items():
        left, right = (
            torch.linalg.qr(torch.randn(SIZE, SIZE, dtype=torch.float64, generator=generator))[0] for _ in range(2)
        )
        matrix = (left * values) @ right
        exact = Spectrum(values.sort().values.numpy()[None], np.full((1, SIZE), 1 / SIZE), (SIZE, SIZE), "dense")
        x = torch.zeros(SIZE, dtype=torch.float64, requires_grad=True)
        jacobian = Jacobian(linearise(lambda x, matrix=matrix: matrix @ x, x, matrix @ x, (), "of the matrix", 0))
        for steps in (24, 64):
            measured = [measure_quadrature(jacobian, PROBES, steps, seed) for seed in range(SEEDS)]
            for statistic, read in STATISTICS.items():
                truth = read(exact)
                errors = [spectrum.error(read) for spectrum in measured]
                misses = [abs(read(spectrum) - truth) for spectrum in measured]
                row = {"spectrum": name, "steps": steps, "statistic": statistic, "truth": truth}
                row |= {"mean_error": float(np.mean(errors)), "mean_miss": float(np.mean(misses))}
                row["covered"] = sum(miss <= error + 1e-12 for miss, error in zip(misses, errors)) / SEEDS
                rows.append(row)
                print(
                    f"{name}, {steps} steps, {statistic}: {truth:.4g}, error {row['mean_error']:.2g}, miss "
                    f"{row['mean_miss']:.2g}, covered {row['covered']:.0%}",
                    flush=True,
                )
    write_csv("error_bars", rows)


if __name__ == "__main__":
    main()
