"""How every mixer starts: equal to the plain residual, and alive. Writes docs/derivations/start.md.

python benchmarks/check_start.py
"""

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

import jpmhc
from harness import write_table

DIM, STREAMS, DEPTH, STEPS = 64, 4, 6, 50
PAGE = Path(__file__).parent.parent / "docs" / "derivations" / "start.md"


def sublayer() -> nn.Module:
    return nn.Sequential(nn.LayerNorm(DIM), nn.Linear(DIM, DIM), nn.Tanh(), nn.Linear(DIM, DIM))


def start_error(mixer: str) -> float:
    """Largest deviation of a fresh block from x + f(x), over the largest |x| + |f(x)|."""
    torch.manual_seed(0)
    f = sublayer()
    block = jpmhc.HyperConnection(f, DIM, STREAMS, mixer, index=0)
    x = torch.randn(512, DIM)
    deviation = block(jpmhc.expand_streams(x, STREAMS)) - jpmhc.expand_streams(x + f(x), STREAMS)
    return float(deviation.detach().abs().max() / (x.abs() + f(x).detach().abs()).max())


def train(
    mixer: str, make: Callable[[nn.Module], torch.optim.Optimizer], symmetric: bool = False
) -> tuple[float, float]:
    """How far streams part and skips move in a model of six layers over fifty steps."""
    torch.manual_seed(0)
    model = jpmhc.HyperConnectionStack(
        jpmhc.HyperConnection(sublayer(), DIM, STREAMS, mixer, index=k) for k in range(DEPTH)
    ).double()
    if symmetric:
        for block in model.connections:
            block.map.bias.data[: block.map.sizes[0]] = 0
    x, target = torch.randn(2, 128, DIM, dtype=torch.float64)
    streams = jpmhc.expand_streams(x, STREAMS)

    def skips() -> Tensor:
        return torch.stack([block.coefficients(streams).skip.detach() for block in model.connections])

    before = skips()
    optimizer = make(model)
    for _ in range(STEPS):
        optimizer.zero_grad()
        (jpmhc.reduce_streams(model(streams)) - target).square().mean().backward()
        optimizer.step()
    out = model(streams).detach()
    return float((out - out.mean(-2, keepdim=True)).abs().max()), float((skips() - before).abs().max())


def main() -> None:
    torch.set_num_threads(1)
    sgd = lambda model: torch.optim.SGD(model.parameters(), lr=0.1)  # noqa: E731
    adam = lambda model: torch.optim.Adam(model.parameters(), lr=1e-3)  # noqa: E731
    lines = [
        "| mixer | start error, float32 | streams apart, SGD | symmetric reads, SGD | skip moved, Adam |",
        "|---|---|---|---|---|",
    ]
    for mixer in jpmhc.MIXERS:
        apart, control, moved = train(mixer, sgd)[0], train(mixer, sgd, symmetric=True)[0], train(mixer, adam)[1]
        numbers = (start_error(mixer), apart, control, moved)
        lines.append(f"| {mixer} | " + " | ".join(f"{number:.1e}" for number in numbers) + " |")
        print(lines[-1], flush=True)
    write_table(PAGE, "start", lines)


if __name__ == "__main__":
    main()
