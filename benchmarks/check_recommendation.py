"""Run networks with the skips that `jpmhc.recommend` judged, and count what has collapsed in them.

Run `python benchmarks/check_recommendation.py`; a minute on two cores. It writes a table of
docs/results/prediction.md and benchmarks/results/recommendation.csv.
"""

from pathlib import Path

import torch

import jpmhc
from check_prediction import run_network
from harness import write_csv, write_table
from jpmhc.spectra import MLP

STREAMS, WIDTH, NETWORKS, DEPTHS = 4, 64, 4, (12, 48, 200)
PAGE = Path(__file__).parent.parent / "docs" / "results" / "prediction.md"


def check_depth(depth: int) -> list[dict]:
    """Compare predicted and measured shares for every mixer at one depth."""
    rows = []
    for rank, one in enumerate(jpmhc.recommend(depth, STREAMS).candidates, 1):
        network = one.network
        layers = (network.skips, network.read, network.write)
        runs = torch.stack([run_network(*layers, MLP("gelu"), WIDTH, seed) for seed in range(NETWORKS)])
        whole = torch.linalg.svdvals(runs.flatten(1, 2))
        own = torch.linalg.svdvals(runs.mean(1).unflatten(-1, (STREAMS, WIDTH)).sum(2))  # of T
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
