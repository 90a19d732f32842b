"""What a diagnosis costs and how good it is: networks with known singular values, and a GPT of 12 layers.

    python benchmarks/bench_diagnose.py [--device cuda] [--tiny] [--dim 768] [--layers 12] [--tokens 256] [--mixers …]

First a linear network whose singular values are known: the largest error of the dense spectrum, W1 and edges of
Lanczos. A wrong spectrum ends the run before anything is timed. Then the GPT (pre-norm attention and MLP), plain
and with hyper-connections: minutes, memory, and what the plan had said.
"""

import argparse
import resource
import time

import numpy as np
import torch
from torch import Tensor, nn

import jpmhc
from harness import write_csv
from jpmhc.diagnose import Spectrum


class Attention(nn.Module):
    """Causal self-attention behind a norm, without a residual."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.norm, self.heads = nn.RMSNorm(dim), heads
        self.qkv, self.out = nn.Linear(dim, 3 * dim, bias=False), nn.Linear(dim, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(self.norm(x)).chunk(3, -1))
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).flatten(2))


class Block(nn.Module):
    """The plain residual block."""

    def __init__(self, *sublayers: nn.Module) -> None:
        super().__init__()
        self.sublayers = nn.ModuleList(sublayers)

    def forward(self, x: Tensor) -> Tensor:
        for sublayer in self.sublayers:
            x = x + sublayer(x)
        return x


class GPT(nn.Module):
    """Embeddings, layers and a norm; without a mixer the plain model."""

    def __init__(self, dim: int, layers: int, heads: int, mixer: str | None) -> None:
        super().__init__()
        self.embed, self.norm, self.mixer = nn.Embedding(256, dim), nn.RMSNorm(dim), mixer

        def pair() -> tuple[nn.Module, nn.Module]:
            mlp = (nn.RMSNorm(dim), nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))
            return Attention(dim, heads), nn.Sequential(*mlp)

        if mixer is None:
            self.layers: nn.Module = nn.Sequential(*(Block(*pair()) for _ in range(layers)))
        else:
            sublayers = [sublayer for _ in range(layers) for sublayer in pair()]
            blocks = (jpmhc.HyperConnection(sublayer, dim, 4, mixer, index=i) for i, sublayer in enumerate(sublayers))
            self.layers = jpmhc.HyperConnectionStack(blocks, reduce=True)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        return self.norm(self.layers(x if self.mixer is None else jpmhc.expand_streams(x, 4)))


def check_accuracy(width: int, device: str) -> dict[str, float]:
    """Measure a linear network both ways and compare with its singular values; a wrong spectrum is refused."""
    torch.manual_seed(0)
    layers = [nn.Linear(width, width, bias=False) for _ in range(6)]
    product = torch.eye(width, dtype=torch.float64)
    for layer in layers:
        with torch.no_grad():
            layer.weight.copy_(torch.eye(width) + 0.1 * torch.randn(width, width) / width**0.5)
        product = layer.weight.detach().double() @ product
    exact = torch.linalg.svdvals(product).flip(0).numpy()
    truth = Spectrum(exact[None], np.full((1, width), 1 / width), (width, width), "dense")
    model, x = nn.Sequential(*layers).to(device), torch.randn(1, width, device=device)
    dense = jpmhc.diagnose(model, x, method="dense", say=None).whole
    lanczos = jpmhc.diagnose(model, x, method="lanczos", say=None).whole
    found = {
        "dense_error": float(np.abs(dense.values[0] - exact).max()),
        "lanczos_w1": lanczos.wasserstein(truth),
        "lanczos_largest": abs(lanczos.largest / exact[-1] - 1),
        "lanczos_smallest": abs(lanczos.smallest / exact[0] - 1),
    }
    limits = {"dense_error": 1e-5, "lanczos_w1": 1e-2, "lanczos_largest": 1e-2, "lanczos_smallest": 1e-2}
    for name, limit in limits.items():
        if not found[name] < limit:
            raise RuntimeError(f"{name} is {found[name]:.2g}, above {limit:g}; refusing to time a wrong spectrum")
    return found


def time_model(mixer: str | None, options: argparse.Namespace) -> dict[str, object]:
    """Diagnose one model and return what it took."""
    torch.manual_seed(0)
    model = GPT(options.dim, options.layers, options.heads, mixer).eval().to(options.device)
    tokens = torch.randint(0, 256, (1, options.tokens), device=options.device)
    if options.device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    begin = time.perf_counter()
    found = jpmhc.diagnose(model, tokens, say=lambda sentence: print(sentence, flush=True), seconds=options.seconds)
    took = time.perf_counter() - begin
    print(f"\n{found}\n", flush=True)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    peak = torch.cuda.max_memory_allocated() if options.device == "cuda" else peak
    error = found.whole.error(lambda spectrum: spectrum.quantile(0.5))
    return {
        "model": mixer or "plain",
        "dim": options.dim,
        "layers": options.layers,
        "tokens": options.tokens,
        "method": found.whole.method,
        "planned_seconds": round(sum(part.seconds for part in found.parts), 1),
        "seconds": round(took, 1),
        "peak_gib": round(peak / 2**30, 2),
        "median": round(found.whole.quantile(0.5), 4),
        "median_error": round(error, 4),
        "largest": round(found.whole.largest, 3),
        "ks": round(found.comparisons[-1].kolmogorov, 4) if found.comparisons else "",
        "modes": found.modes.count if found.modes else "",
        "largest_eigenvalue": round(float(found.modes.eigenvalues[0]), 2) if found.modes else "",
        "notes": "; ".join(found.notes),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--tiny", action="store_true", help="two layers of 32 features and 8 tokens: does it run?")
    parser.add_argument("--dim", type=int, default=768)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--heads", type=int, default=12)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--mixers", nargs="*", default=["cayley"], help="beside the plain model")
    parser.add_argument("--seconds", type=float, default=300.0, help="what one diagnosis may take")
    options = parser.parse_args()
    if options.tiny:
        options.dim, options.layers, options.heads, options.tokens = 32, 2, 2, 8
    accuracy = check_accuracy(256 if options.tiny else 1024, options.device)
    print("  ".join(f"{name} {value:.2g}" for name, value in accuracy.items()))
    rows = [time_model(mixer, options) for mixer in (None, *options.mixers)]
    print(f"{options.layers} layers, d = {options.dim}, {options.tokens} tokens on {options.device}")
    columns = (
        "model",
        "method",
        "planned_seconds",
        "seconds",
        "peak_gib",
        "median",
        "median_error",
        "largest",
        "ks",
        "modes",
    )
    for row in ({column: column for column in columns}, *rows):
        print("  ".join(f"{row[column]!s:>15}" for column in columns))
    if not options.tiny:
        write_csv(f"diagnose_{options.device}", [row | accuracy for row in rows], options.device)


if __name__ == "__main__":
    main()
