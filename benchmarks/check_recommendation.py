"""Run networks with the skips that `jpmhc.recommend` judged, and count what has collapsed in them.

Run `python benchmarks/check_recommendation.py`; a minute on two cores. It writes a table of
docs/results/prediction.md and benchmarks/results/recommendation.csv.
"""

import math
from pathlib import Path

import torch
from torch import Tensor

import jpmhc
from harness import write_csv, write_table
from jpmhc.spectra.activations import get_activation

STREAMS, WIDTH, NETWORKS, DEPTHS = 4, 64, 4, (12, 48, 200)
PAGE = Path(__file__).parent.parent / "docs" / "results" / "prediction.md"


def run_network(skips: Tensor, read: Tensor, write: Tensor, seed: int) -> tuple[Tensor, Tensor]:
    """Run one pre-norm GELU network; return the singular values of J and of T."""
    generator = torch.Generator().manual_seed(seed)
    phi, hidden, size = get_activation("gelu"), 4 * WIDTH, STREAMS * WIDTH
    x = torch.randn(WIDTH, dtype=torch.float64, generator=generator)
    x = (x / x.square().mean().sqrt()).expand(STREAMS, -1)
    jacobian = torch.eye(size, dtype=torch.float64).view(STREAMS, WIDTH, size)
    for skip, r, w in zip(skips, read, write):
        first = torch.randn(hidden, WIDTH, dtype=torch.float64, generator=generator) / math.sqrt(WIDTH)
        last = torch.randn(WIDTH, hidden, dtype=torch.float64, generator=generator) / math.sqrt(hidden)
        u, du = r @ x, torch.einsum("j,jpc->pc", r, jacobian)
        rms = u.square().mean().sqrt()
        unit = u / rms
        before, change = first @ unit, first @ ((du - torch.outer(unit, unit @ du) / WIDTH) / rms)
        x = skip @ x + torch.outer(w, last @ phi.function(before))
        change = last @ (phi.derivative(before).unsqueeze(-1) * change)
        jacobian = torch.einsum("ij,jpc->ipc", skip, jacobian) + torch.einsum("i,pc->ipc", w, change)
    whole = jacobian.view(size, size)
    own = jacobian.mean(0).view(WIDTH, STREAMS, WIDTH).sum(1)
    return torch.linalg.svdvals(whole), torch.linalg.svdvals(own)


def check_depth(depth: int) -> list[dict]:
    """Compare predicted and measured shares for every mixer at one depth."""
    rows = []
    for rank, one in enumerate(jpmhc.recommend(depth, STREAMS).candidates, 1):
        network = one.network
        runs = [run_network(network.skips, network.read, network.write, seed) for seed in range(NETWORKS)]
        whole, own = (torch.cat([run[part] for run in runs]) for part in (0, 1))
        rows.append(
            {
                "depth": depth,
                "rank": rank,
                "mixer": one.mixer,
                "predicted_j": one.collapsed,
                "measured_j": float((whole < 0.1).double().mean()),
                "predicted_t": one.collapsed_model,
                "measured_t": float((own < 0.1).double().mean()),
            }
        )
        print(f"L = {depth}, {one.mixer}: J {one.collapsed:.3f} and {rows[-1]['measured_j']:.3f}", flush=True)
    return rows


def list_shares(rows: list[dict]) -> list[str]:
    """Return a table of predicted and measured shares for J and one for T; mixers with equal shares have one line."""
    depths = sorted({int(row["depth"]) for row in rows})
    shares = {(row["mixer"], int(row["depth"])): row for row in rows}
    lines = []
    for part in "JT":
        names: dict[str, list[str]] = {}
        for mixer in dict.fromkeys(row["mixer"] for row in rows):
            pairs = (
                [f"{float(shares[mixer, depth][f'{kind}_{part.lower()}']):.1%}" for kind in ("predicted", "measured")]
                for depth in depths
            )
            names.setdefault(" | ".join(map(", ".join, pairs)), []).append(mixer)
        lines += ["", f"| {part} | " + " | ".join(f"L = {depth}" for depth in depths) + " |"]
        lines += ["|---" * (1 + len(depths)) + "|"]
        lines += [f"| {', '.join(mixers)} | {cells} |" for cells, mixers in names.items()]
    return lines[1:]


def main() -> None:
    """Check all depths and write the tables."""
    rows = [row for depth in DEPTHS for row in check_depth(depth)]
    write_table(PAGE, "recommendation", list_shares(rows))
    write_csv("recommendation", rows)


if __name__ == "__main__":
    main()
