"""Tied weights on the recursive model: the theory of layers that share weights beside the model's own Jacobian.

One recursion of a fresh recursive model is run with all positions of a row alike, so that attention is the product of
two matrices; the map is that from the state before the first call to the state after the last. The theory gets the
coefficients of every call, the gains of its sublayers, how alike the Jacobians of two calls of one sublayer are, and
that sublayers are products of two matrices; beside it, Gaussian sublayers, and layers taken for independent. Every case
is run at three widths: what shrinks with the width is no fault of the theory, which is that of infinite width.

    python benchmarks/check_tied.py

takes some minutes on two cores and writes benchmarks/results/tied.csv.
"""

import time

import torch
from torch import Tensor
from torch.autograd import forward_ad

from harness import write_csv
from jpmhc import spectra
from jpmhc.diagnose.jacobian import plain_connections
from jpmhc.diagnose.methods import spectrum_of
from jpmhc.diagnose.record import LayerCall, Recording, find_layers, record_layers
from jpmhc.diagnose.theory import kolmogorov_distance, token_coefficients
from jpmhc.experiments.models.layers import Attention, SwiGLU, inner_width
from jpmhc.experiments.models.recursive import RecursiveConfig, RecursiveCore
from jpmhc.spectra import sublayers

# Mixer, streams, calls of the network, what a sublayer's output is multiplied by, and features of a stream: of the
# second width a density is computed too.
CASES = (
    ("cayley", 2, 6, 0.1, (128, 256, 512)),
    ("cayley", 2, 6, 0.3, (128, 256, 512)),
    ("rotation", 4, 3, 0.2, (96, 192, 384)),
    ("sinkhorn", 4, 3, 0.2, (96, 192, 384)),
)
NETWORKS, POSITIONS = 6, 2
QUANTILES = (0.01, 0.5, 0.99)
# Where G is compared, over the median square.
POINTS = (0.05, 0.3, 1.0, 3.0)
ROWS = 64
MULTIPLE = 16  # of the feed-forward layers' inner widths


def run_recursion(
    mixer: str, streams: int, calls: int, scale: float, dim: int, seed: int
) -> tuple[Tensor, Tensor, Recording]:
    """Run a fresh model's network so many times; return the first state, the last one, and every connection's call."""
    torch.manual_seed(seed)
    config = RecursiveConfig(
        dim=dim,
        mixer=mixer,
        streams=streams,
        heads=4,
        layers=1,
        inner_multiple=MULTIPLE,
        puzzle_slots=1,
        stream_span="recursion",
        mixer_write_scale=scale,
    )
    core = RecursiveCore(config, vocabulary=12, length=POSITIONS - 1).requires_grad_(False)
    state, injection = (torch.randn(dim).expand(1, POSITIONS, streams, dim) for _ in range(2))
    first, recording = state.clone().requires_grad_(), Recording()
    with record_layers(core, find_layers(core), recording), plain_connections(), forward_ad.dual_level():
        last = first
        for _ in range(calls):
            last = core.apply_network(last, injection)
    return first, last, recording


def measure_jacobian(y: Tensor, x: Tensor) -> Tensor:
    """Return the derivative of the first position of y by a change of x that is the same at all positions."""
    size = y[0, 0].numel()
    units = torch.zeros(size, *y.shape)
    units[:, 0, 0] = torch.eye(size).unflatten(1, y.shape[2:])
    parts = [torch.autograd.grad(y, x, part, retain_graph=True, is_grads_batched=True)[0] for part in units.split(ROWS)]
    return torch.cat(parts)[:, 0].sum(1).flatten(1).double()


def predict(calls: list[LayerCall]) -> dict[str, spectra.Network]:
    """Return the theory's networks: with tied weights, with tied Gaussian sublayers, and with independent layers."""
    matrices = torch.stack([measure_jacobian(call.output, call.inside).flatten() for call in calls])
    width = calls[0].inside.shape[-1]
    gains = matrices.square().sum(1) / width
    unit = matrices / matrices.norm(dim=1, keepdim=True)
    same = torch.tensor([[float(one.module is other.module) for one in calls] for other in calls])
    alike = ((unit @ unit.mT) * same).fill_diagonal_(1)
    alike = (alike + alike.mT) / 2
    # Attention over equal positions is the product of two square matrices.
    inner = inner_width(width, 4.0, MULTIPLE) / width
    laws = {Attention: sublayers.two_matrix("linear", ratio=1.0), SwiGLU: sublayers.gated("silu", ratio=inner)}
    chosen = [laws[type(call.module.sublayer)] for call in calls]
    reads, writes, skips = (torch.stack(parts) for parts in zip(*token_coefficients(calls, [0.0] * len(calls), 0)))
    layers = (skips, gains, reads, writes)
    return {
        "tied": spectra.Network(*layers, sublayers=chosen, tied=alike),
        "tied Gaussian": spectra.Network(*layers, tied=alike),
        "independent": spectra.Network(*layers, sublayers=chosen),
    }


def check_width(mixer: str, streams: int, calls: int, scale: float, dim: int, with_density: bool) -> dict:
    """Run the networks of one width; return the errors of G, and of the first network KS and quantiles.

    The norm after the last call takes from each stream its own direction, whatever the width: as many singular values
    as there are streams are zero, and are left out, except in `error_with_zeros`.
    """
    differences: dict[str, list[Tensor]] = {}
    row = {"mixer": mixer, "streams": streams, "calls": calls, "write_scale": scale, "dim": dim, "networks": NETWORKS}
    densities = {}
    for seed in range(NETWORKS):
        first, last, recording = run_recursion(mixer, streams, calls, scale, dim, seed)
        jacobian = measure_jacobian(last, first)
        squares = torch.linalg.svdvals(jacobian).square()
        z = float(squares.median()) * (torch.tensor(POINTS, dtype=torch.float64) + 0.3j)
        rest, whole = ((1 / (z.unsqueeze(-1) - part)).mean(-1) for part in (squares[:-streams], squares))
        for what, network in predict(recording.calls).items():
            found = spectra.cauchy(network, z).G
            differences.setdefault(what, []).append((found - rest) / rest.abs())
            if what == "tied":
                differences.setdefault("with zeros", []).append((found - whole) / whole.abs())
            if with_density and seed == 0 and what != "tied Gaussian":
                density = spectra.density(network)
                row[f"ks_{what}"] = kolmogorov_distance(spectrum_of(jacobian), density)
                densities[what] = density
        if densities and seed == 0:
            for place in QUANTILES:
                row[f"q{place:g}_measured"] = float(squares[:-streams].sqrt().quantile(place))
                row |= {f"q{place:g}_{what}": density.quantile(place) for what, density in densities.items()}
    for what, found in differences.items():
        name, each = what.replace(" ", "_"), torch.stack(found)
        row[f"error_{name}"] = float(each.mean(0).abs().max())
        row[f"one_network_{name}"] = float(each.abs().amax(1).mean())
    return row


def main() -> None:
    """Run all cases and print each."""
    torch.set_num_threads(1)  # matrices are small
    rows: list[dict] = []
    for *case, widths in CASES:
        for dim in widths:
            start = time.perf_counter()
            rows.append(check_width(*case, dim, with_density=dim == widths[1]))
            numbers = {name: value for name, value in rows[-1].items() if name.startswith(("error", "one", "ks", "q"))}
            print(*case, dim, f"{time.perf_counter() - start:.0f} s")
            print("  ", ", ".join(f"{name} {value:.3g}" for name, value in numbers.items()), flush=True)
    columns = max(rows, key=len)
    write_csv("tied", [{name: row.get(name, "") for name in columns} for row in rows])


if __name__ == "__main__":
    main()
