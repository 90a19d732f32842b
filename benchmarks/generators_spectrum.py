"""What a basis of permutations with a larger spectral gap does to the predicted Jacobian spectrum.

Run `python benchmarks/generators_spectrum.py`; a few minutes. Four streams, Lσ² = 0.05, isotropic noise. The weights of
the permutations are uniform, or a softmax of N(0, 1) logits drawn anew in each layer (mean of several draws), or those
of a mixer near its start: 95 % on the identity and the rest uniform.
"""

import math

import torch

from harness import write_csv
from jpmhc import generators, spectra
from jpmhc.manifolds import permutation

STREAMS, SIZE, NOISE, DRAWS = 4, 6, 0.05, 4
NEAR_IDENTITY, COLLAPSED, WIDTH = 0.95, 0.1, 64


def bases() -> dict[str, torch.Tensor]:
    """The bases compared, by name."""
    found = {"paper's default": permutation.basis(STREAMS, SIZE)}
    for name, size, identity in (
        ("largest gap", SIZE, False),
        ("largest gap with the identity", SIZE, True),
        ("five, largest gap with the identity", 5, True),
    ):
        found[name] = generators.best_generating_set(STREAMS, size, contains_identity=identity).perms
    return found


def collapsed(basis: torch.Tensor, depth: int, logits: torch.Tensor) -> tuple[float, float, float]:
    """Fraction of singular values below 0.1, predicted and simulated, and their mean square, of one network."""
    network = spectra.Network(permutation.mix(logits, basis), NOISE / depth)
    density = spectra.density(network)
    simulated = spectra.simulate(network, WIDTH, 2, 0).sqrt() < COLLAPSED
    return density.collapsed(COLLAPSED), float(simulated.double().mean()), float(density.moments(1)[0])


def logits_of(weights: str, basis: torch.Tensor, depth: int, generator: torch.Generator) -> torch.Tensor:
    """One row of logits for each layer."""
    if weights == "random":
        return torch.randn(depth, len(basis), generator=generator, dtype=torch.float64)
    logits = torch.zeros(depth, len(basis), dtype=torch.float64)
    if weights == "near identity":
        identity = (basis == torch.arange(STREAMS)).all(-1)
        logits[:, identity] = math.log(NEAR_IDENTITY / (1 - NEAR_IDENTITY) * (len(basis) - 1))
    return logits


def main() -> None:
    """Predict every case and write the results."""
    rows = []
    for name, basis in bases().items():
        for weights, depth, draws in (
            ("uniform", 2, 1),
            ("uniform", 10, 1),
            ("random", 2, DRAWS),
            ("random", 10, DRAWS),
            ("near identity", 10, 1),
            ("near identity", 40, 1),
        ):
            if weights == "near identity" and not (basis == torch.arange(STREAMS)).all(-1).any():
                continue
            generator = torch.Generator().manual_seed(0)
            found = [collapsed(basis, depth, logits_of(weights, basis, depth, generator)) for _ in range(draws)]
            mass, simulated, moment = torch.tensor(found, dtype=torch.float64).mean(0).tolist()
            rows.append(
                {
                    "basis": name,
                    "gap": generators.spectral_gap(basis),
                    "stream_gap": generators.stream_gap(basis),
                    "depth": depth,
                    "weights": weights,
                    "collapsed": mass,
                    "collapsed_simulated": simulated,
                    "mean_square": moment,
                }
            )
            print(rows[-1], flush=True)
    write_csv("generators_spectrum", rows)


if __name__ == "__main__":
    main()
