"""What hyper-connections cost in a transformer: step time, memory, first call, and the time of one decoding step.

    python benchmarks/bench_transformer.py [--sizes small medium large] [--models plain cayley sinkhorn]
        [--modes eager compiled reduce-overhead] [--peers] [--decode]

A byte-level GPT (pre-norm attention and MLP, in bfloat16) trains on random tokens: `small` is 16 layers of d = 384 with
16,384 tokens a step, `medium` 6 layers of d = 2048 with 8 × 2048 tokens, `large` 3 layers of d = 4096 with 16,384.
Every model takes turns with the plain one in the same process, and one that does not start as it does is not timed.
A model named `cayley+recompute` keeps only some of its streams (`recompute="auto"`), `cayley+delayed` delays its reads,
and `cayley/2` has two streams.
`--page` writes the newest row of each model into the table of docs/guides/cost.md. `--peers` adds liger-kernel's
LigerMHC (eager) and hyper-connections' mHC (eager and compiled) where they are installed. On a machine without CUDA,
`--sizes tiny` runs everything small in float32.
"""

import argparse
import gc
import importlib.util
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import jpmhc
from harness import RESULTS, captured, interleaved, milliseconds, read_csv, write_csv, write_table

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPE = torch.bfloat16 if DEVICE == "cuda" else torch.float32
VOCABULARY = 256
PAGE = Path(__file__).parents[1] / "docs" / "guides" / "cost.md"
MODES = ("eager", "compiled", "reduce-overhead")
# Packages beside ours: what has to be installed, and the modes they are timed in.
PEERS = {"liger": ("liger_kernel", ("eager",)), "hyper-connections": ("hyper_connections", ("eager", "compiled"))}


class Size(NamedTuple):
    layers: int
    dim: int
    heads: int
    batch: int
    length: int


SIZES = {
    "tiny": Size(2, 32, 2, 2, 16),
    "small": Size(16, 384, 6, 64, 256),
    "medium": Size(6, 2048, 16, 8, 2048),
    "large": Size(3, 4096, 32, 8, 2048),
}


class Attention(nn.Module):
    def __init__(self, size: Size) -> None:
        super().__init__()
        self.heads = size.heads
        self.norm = nn.RMSNorm(size.dim)
        self.inner = nn.Linear(size.dim, 3 * size.dim, bias=False)
        self.outer = nn.Linear(size.dim, size.dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.inner(self.norm(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        return self.outer(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class MLP(nn.Module):
    def __init__(self, size: Size) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(size.dim)
        self.inner = nn.Linear(size.dim, 4 * size.dim, bias=False)
        self.outer = nn.Linear(4 * size.dim, size.dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.outer(F.gelu(self.inner(self.norm(x))))


def parse(model: str) -> tuple[str, int, dict[str, str | bool]]:
    """Return the mixer, the number of streams and the stack's options of a model like `cayley/2+recompute`."""
    name, _, option = model.partition("+")
    mixer, _, streams = name.partition("/")
    return mixer, int(streams or 4), {"": {}, "recompute": {"recompute": "auto"}, "delayed": {"delayed": True}}[option]


class GPT(nn.Module):
    """The model; `mixer` is "plain" for residual additions, a peer, or a mixer's name (+recompute, +delayed)."""

    def __init__(self, size: Size, mixer: str) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, size.dim)
        layers = [make(size) for _ in range(size.layers) for make in (Attention, MLP)]
        self.mixer, self.blocks = mixer, nn.ModuleList()
        if mixer == "plain":
            self.blocks.extend(layers)
        elif mixer == "liger":
            from liger_kernel.transformers import LigerMHC

            self.blocks.extend(LigerMHC(layer, hc=4, c=size.dim, phi_dtype=torch.bfloat16) for layer in layers)
        elif mixer == "hyper-connections":
            from hyper_connections import mHC

            self.blocks.extend(mHC(4, dim=size.dim, branch=f, layer_index=k) for k, f in enumerate(layers))
        else:
            name, streams, options = parse(mixer)
            connections = [jpmhc.HyperConnection(f, size.dim, streams, name, index=k) for k, f in enumerate(layers)]
            self.blocks.append(jpmhc.HyperConnectionStack(connections, expand=True, reduce=True, **options))
        self.norm = nn.RMSNorm(size.dim)
        self.head = nn.Linear(size.dim, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        if self.mixer == "plain":
            for block in self.blocks:
                x = x + block(x)
        elif self.mixer == "liger":
            x = jpmhc.expand_streams(x, 4)
            for block in self.blocks:
                x = block(x)
            x = x.mean(-2)
        elif self.mixer == "hyper-connections":  # its streams are in the batch, a sequence's four side by side
            x = x.repeat_interleave(4, 0)
            for block in self.blocks:
                x = block(x)
            x = x.unflatten(0, (-1, 4)).mean(1)
        else:
            x = self.blocks[0](x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1).float(), tokens.roll(-1, 1).flatten())


def make_step(model: nn.Module, run: Callable, tokens: Tensor) -> Callable[[], Tensor]:
    """One training step: forward, backward and a fused AdamW."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=DEVICE == "cuda")

    def step() -> Tensor:
        optimizer.zero_grad()
        loss = run(tokens)
        loss.backward()
        optimizer.step()
        return loss

    return step


def build(size: Size, mixer: str) -> GPT:
    """The model with the same sublayers' weights whatever the mixer."""
    torch.manual_seed(0)
    with torch.device(DEVICE):  # to draw large models on the CPU would take longer than to time them
        model = GPT(size, mixer)
    generator = torch.Generator(DEVICE).manual_seed(1)
    for name, parameter in model.named_parameters():
        if parameter.ndim == 2 and ".map." not in name and "LigerMHC" not in name:
            with torch.no_grad():
                parameter.normal_(std=0.02, generator=generator)
    return model.to(DTYPE)


class Trial(NamedTuple):
    """A model that is ready to train, and what its first step took."""

    step: Callable[[], Tensor]
    loss: float
    first_call_s: float
    peak_gib: float  # beyond what was allocated before the model was made


def try_model(size: Size, mixer: str, mode: str, tokens: Tensor) -> Trial:
    """Make the model and train it for some steps."""
    gc.collect()
    before = torch.cuda.memory_allocated() if DEVICE == "cuda" else 0
    model = build(size, mixer)
    loss = model(tokens).item()
    options = {"mode": mode} if mode == "reduce-overhead" else {}
    run = model if mode == "eager" else torch.compile(model, **options)
    step = make_step(model, run, tokens)
    if DEVICE == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    start = time.perf_counter()
    step()
    if DEVICE == "cuda":
        torch.cuda.synchronize()
    first = time.perf_counter() - start
    for _ in range(4):
        step()
    peak = torch.cuda.max_memory_allocated() - before if DEVICE == "cuda" else 0
    return Trial(step, loss, first, peak / 2**30)


def time_models(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Time every model in turns with the plain one, so that a host that is slow for a while is slow for both."""
    torch._dynamo.config.cache_size_limit = 64  # all models share one forward
    rows: list[dict[str, Any]] = []
    for name in arguments.sizes:
        size = SIZES[name]
        tokens = torch.randint(VOCABULARY, (size.batch, size.length), device=DEVICE)
        for mode in arguments.modes:
            torch.compiler.reset()
            plain = try_model(size, "plain", mode, tokens)
            for mixer in arguments.models:
                if mixer in PEERS and mode not in PEERS[mixer][1]:
                    continue
                trial = plain if mixer == "plain" else try_model(size, mixer, mode, tokens)
                if mixer not in PEERS and abs(trial.loss - plain.loss) > 2e-2:
                    raise SystemExit(f"{mixer} starts with loss {trial.loss}, the plain model with {plain.loss}")
                steps = {"plain": plain.step, mixer: trial.step}
                ms = interleaved(steps, arguments.repeats, 5, DEVICE)
                row = {
                    "size": name, "layers": size.layers, "dim": size.dim, "tokens": size.batch * size.length,
                    "model": mixer, "mode": mode, "step_ms": round(ms[mixer], 3), "plain_ms": round(ms["plain"], 3),
                    "step_ratio": round(ms[mixer] / ms["plain"], 3), "peak_gib": round(trial.peak_gib, 3),
                    "memory_ratio": round(trial.peak_gib / plain.peak_gib, 3) if plain.peak_gib else "",
                    "first_call_s": round(trial.first_call_s, 1), "loss": round(trial.loss, 4),
                }  # fmt: skip
                rows.append(row)
                print(*(f"{key} {value}" for key, value in row.items()), flush=True)
                del trial, steps
            del plain
    return rows


def list_steps(rows: list[dict[str, Any]]) -> list[str]:
    """The page's table: the newest row of each model that took turns with the plain one."""
    newest = {(r["size"], r["mode"], r["model"]): r for r in rows if r["plain_ms"] and r["model"] != "plain"}
    order = {name: k for k, name in enumerate([*SIZES, *MODES])}
    lines = [
        "| size | mode | mixer | streams | stack | step, ms | memory, GiB |",
        "|---|---|---|---|---|---|---|",
    ]
    for (size, mode, model), row in sorted(newest.items(), key=lambda item: [order.get(key, 0) for key in item[0]]):
        mixer, streams, options = (model, 4, {}) if model in PEERS else parse(model)
        stack = ", ".join(f"{name}={value}" for name, value in options.items())
        ratio, memory = float(row["step_ratio"]), float(row["memory_ratio"])
        plain = float(row["peak_gib"]) / memory
        lines.append(
            f"| {size}: {row['layers']} layers, d = {row['dim']} | {mode} | {mixer} | {streams} | {stack} | "
            f"{float(row['plain_ms']):.1f} → {float(row['step_ms']):.1f} (+{100 * (ratio - 1):.0f} %) | "
            f"{plain:.1f} → {float(row['peak_gib']):.1f} (+{100 * (memory - 1):.0f} %) |"
        )
    return lines


def time_decoding(mixers: list[str], dims: list[int]) -> list[dict[str, Any]]:
    """Write of one connection and read of the next for few tokens, without gradients."""
    rows = []
    for dim in dims:
        for mixer in mixers:
            blocks = [jpmhc.HyperConnection(None, dim, 4, mixer, index=k).to(DEVICE) for k in range(2)]
            for block in blocks:
                nn.init.normal_(block.map.weight)
            for tokens in (1, 8, 64, 256):
                x = torch.randn(tokens, 4, dim, device=DEVICE, dtype=DTYPE)

                def seams(count: int, x=x, blocks=blocks) -> Tensor:
                    with torch.inference_mode():
                        h, state = blocks[0].read(x)
                        for k in range(count):
                            x, h, state = blocks[k % 2].write_read(x, h, state, blocks[(k + 1) % 2])
                        return h

                row: dict[str, Any] = {"mixer": mixer, "dim": dim, "tokens": tokens}
                many = [milliseconds(lambda c=c, s=seams: s(c), 30, 5, DEVICE) for c in (1, 21)]
                row["eager_us"] = round((many[1] - many[0]) / 20 * 1e3, 1)
                if DEVICE == "cuda":
                    graphs = [captured(lambda c=c, s=seams: s(c))[0] for c in (1, 21)]
                    replays = [milliseconds(graph.replay, 50, 5, DEVICE) for graph in graphs]
                    row["graph_us"] = round((replays[1] - replays[0]) / 20 * 1e3, 1)
                rows.append(row)
                print(row, flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="*", choices=SIZES, default=["small", "medium", "large"])
    parser.add_argument("--models", nargs="+", default=["plain", "cayley", "sinkhorn"])
    parser.add_argument("--modes", nargs="+", choices=MODES, default=["eager", "compiled"])
    parser.add_argument("--peers", action="store_true", help="other packages beside ours, where they are installed")
    parser.add_argument("--decode", nargs="*", metavar="MIXER", help="time few tokens for these mixers (none: all)")
    parser.add_argument("--dims", nargs="+", type=int, default=[2048, 4096], help="widths of the decoding table")
    parser.add_argument("--page", action="store_true", help="time nothing, write the table of the page on cost")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--folder", type=Path, default=RESULTS, help="where the CSV files go")
    arguments = parser.parse_args()
    if arguments.page:
        write_table(PAGE, "steps", list_steps(read_csv("transformer", arguments.folder)))
        return
    unknown = [m for m in arguments.models if m != "plain" and parse(m)[0] not in jpmhc.MIXERS]
    if unknown:
        parser.error(f"unknown model {unknown[0]!r}: choose plain or a mixer of {', '.join(jpmhc.MIXERS)}")
    if arguments.peers:
        there = [name for name, (package, _) in PEERS.items() if importlib.util.find_spec(package)]
        arguments.models += [name for name in there if DEVICE == "cuda" or name != "liger"]  # which needs CUDA
    if arguments.decode is not None:
        rows = time_decoding(arguments.decode or list(jpmhc.MIXERS), arguments.dims)
        write_csv("transformer_decode", rows, DEVICE, arguments.folder)
    if arguments.sizes:
        write_csv("transformer", time_models(arguments), DEVICE, arguments.folder)


if __name__ == "__main__":
    main()
