"""Tied weights on the recursive model: the theory of layers that share weights beside the model's own Jacobian.

One recursion of `jpmhc.trm`'s model, fresh, is run with all positions of a row alike, so that attention is the product
of two matrices; the map is that from the state before the first call to the state after the last. The theory gets the
coefficients of every call, the gains of its sublayers, how alike the Jacobians of two calls of one sublayer are, and
that sublayers are products of two matrices; beside it, Gaussian sublayers, and layers taken for independent.

    python benchmarks/check_tied.py

takes a minute on two cores and writes benchmarks/results/tied.csv.
"""

import time

import torch
from torch import Tensor
from torch.autograd import forward_ad

from harness import write_csv
from jpmhc import spectra
from jpmhc.diagnose.jacobian import plain_connections
from jpmhc.diagnose.record import LayerCall, Recording, find_layers, record_layers
from jpmhc.diagnose.theory import token_coefficients
from jpmhc.spectra import sublayers
from jpmhc.trm.model.config import RecursiveConfig
from jpmhc.trm.model.layers import Attention, SwiGLU, inner_width
from jpmhc.trm.model.recursive import RecursiveCore

# Mixer, streams, features of a stream, calls of the network, and what a sublayer's output is multiplied by.
CASES = (
    ("cayley", 2, 128, 6, 0.1),
    ("cayley", 2, 128, 6, 0.3),
    ("rotation", 4, 96, 3, 0.2),
    ("sinkhorn", 4, 96, 3, 0.2),
)
POSITIONS = 2
QUANTILES = (0.01, 0.25, 0.5, 0.75, 0.99)
# Where G is compared, over the median square.
POINTS = (0.05, 0.3, 1.0, 3.0)
ROWS = 64
MULTIPLE = 16  # of the feed-forward layers' inner widths


def run_recursion(mixer: str, streams: int, dim: int, calls: int, scale: float) -> tuple[Tensor, Tensor, Recording]:
    """Run a fresh model's network so many times; return the first state, the last one, and every connection's call."""
    torch.manual_seed(0)
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


def check_case(mixer: str, streams: int, dim: int, calls: int, scale: float) -> list[dict]:
    """Measure one case; return a row of quantiles for the model and for each of the three theories."""
    first, last, recording = run_recursion(mixer, streams, dim, calls, scale)
    values = torch.linalg.svdvals(measure_jacobian(last, first))
    squares = values.square()
    names = {"mixer": mixer, "streams": streams, "dim": dim, "calls": calls, "write_scale": scale}
    rows = [{**names, "what": "measured", **{f"q{p:g}": float(values.quantile(p)) for p in QUANTILES}, "error": 0.0}]
    z = float(squares.median()) * (torch.tensor(POINTS, dtype=torch.float64) + 0.3j)
    truth = (1 / (z.unsqueeze(-1) - squares)).mean(-1)
    grid = torch.logspace(float(squares.quantile(0.01).log10()) - 1.5, float(squares.max().log10()) + 0.5, 100).double()
    for what, network in predict(recording.calls).items():
        found = spectra.density(network, grid, relative_eta=0.005)
        error = float(((spectra.cauchy(network, z).G - truth).abs() / truth.abs()).max())
        quantiles = {f"q{p:g}": found.quantile(p) for p in QUANTILES}
        rows.append({**names, "what": what, **quantiles, "error": error})
    return rows


def main() -> None:
    """Run all cases and print each."""
    rows = []
    for case in CASES:
        start = time.perf_counter()
        rows += check_case(*case)
        print(*case, f"{time.perf_counter() - start:.0f} s")
        for row in rows[-4:]:
            quantiles = " ".join(f"{row[f'q{p:g}']:.4g}" for p in QUANTILES)
            print(f"   {row['what']}: quantiles {quantiles}, error of G {row['error']:.1%}", flush=True)
    write_csv("tied", rows)


if __name__ == "__main__":
    main()
