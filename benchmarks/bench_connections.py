"""One hyper-connection around nn.Linear, forward and backward on the CPU, beside other packages in the same process.

    python benchmarks/bench_connections.py [--compiled] [--tokens 4096] [--dim 512] [--streams 4]
    python benchmarks/bench_connections.py --forward --tokens 1 --repeats 2000

With `--forward` the forward pass alone is timed, without gradients, and the fastest call counts: for few tokens that is
the time of the host.

Peers: `hyper-connections` (HC, mHC and mHC v2, from PyPI) and, if installed, the DeepSeek-V4 hyper-connection of
`transformers`. A ratio above one says how many times slower than ours with the same kind of mixer the peer is.
"""

import argparse
import importlib.util
from collections.abc import Callable

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

import jpmhc
from harness import interleaved, saved_bytes, write_csv

Case = tuple[Tensor, Callable[[Tensor], Tensor]]


def batch(tokens: int) -> tuple[int, int]:
    """Sequences of 64 tokens, or one that is shorter."""
    return max(tokens // 64, 1), min(tokens, 64)


def ours(mixer: str, tokens: int, dim: int, streams: int) -> Case:
    block = jpmhc.HyperConnection(nn.Linear(dim, dim), dim, streams, mixer, index=0, kernels="reference")
    return torch.randn(*batch(tokens), streams, dim), block


def hyper_connections(kind: str, tokens: int, dim: int, streams: int) -> Case:
    if kind == "HC":
        from hyper_connections import HyperConnections as Peer
    else:
        from hyper_connections import mHC as Peer
    # This package keeps the streams in the batch: [batch * n, sequence, dim].
    sequences, length = batch(tokens)
    block = Peer(streams, dim=dim, branch=nn.Linear(dim, dim), layer_index=0)
    return torch.randn(sequences * streams, length, dim), block


def deepseek(tokens: int, dim: int, streams: int) -> Case:
    from transformers.models.deepseek_v4.configuration_deepseek_v4 import DeepseekV4Config
    from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4HyperConnection

    class Block(nn.Module):
        """The connection as its decoder layer uses it, around one linear layer."""

        def __init__(self) -> None:
            super().__init__()
            self.connection = DeepseekV4HyperConnection(DeepseekV4Config(hidden_size=dim, hc_mult=streams))
            for parameter in self.connection.parameters():
                nn.init.normal_(parameter, std=0.02)
            self.branch = nn.Linear(dim, dim)

        def forward(self, x: Tensor) -> Tensor:
            post, comb, collapsed = self.connection(x)
            return post.unsqueeze(-1) * self.branch(collapsed).unsqueeze(-2) + comb.mT @ x

    return torch.randn(*batch(tokens), streams, dim), Block()


def cases(chosen: list[str], tokens: int, dim: int, streams: int) -> dict[str, Case]:
    shape = (tokens, dim, streams)
    found = {f"jpmhc {name}": ours(name, *shape) for name in chosen}
    found |= {f"hyper-connections {kind}": hyper_connections(kind, *shape) for kind in ("HC", "mHC")}
    if importlib.util.find_spec("transformers") is not None:
        found["transformers DeepSeek-V4"] = deepseek(*shape)
    return found


PEER_OF = {
    "hyper-connections HC": "jpmhc unconstrained",
    "hyper-connections mHC": "jpmhc sinkhorn",
    "transformers DeepSeek-V4": "jpmhc sinkhorn",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--compiled", action="store_true", help="compile ours and theirs with torch.compile")
    parser.add_argument("--forward", action="store_true", help="the forward pass alone, without gradients")
    parser.add_argument("--tokens", type=int, default=64 * 64)
    parser.add_argument("--dim", type=int, default=512)
    parser.add_argument("--streams", type=int, default=4)
    parser.add_argument("--mixers", nargs="+", default=list(jpmhc.MIXERS), choices=list(jpmhc.MIXERS))
    parser.add_argument("--repeats", type=int, default=20)
    options = parser.parse_args()
    torch.manual_seed(0)
    runs, memory = {}, {}
    for name, (x, block) in cases(options.mixers, options.tokens, options.dim, options.streams).items():
        x.requires_grad_()
        function = torch.compile(block, fullgraph=True) if options.compiled else block
        out = function(x)
        if not bool(torch.isfinite(out).all()):
            raise RuntimeError(f"{name} gives NaN or infinity; refusing to time it")
        gradient = torch.randn_like(out)
        memory[name] = saved_bytes(lambda function=function, x=x: function(x))
        if options.forward:
            runs[name] = torch.no_grad()(lambda function=function, x=x: function(x))
            continue
        parameters = list(block.parameters())
        runs[name] = lambda function=function, x=x, parameters=parameters, gradient=gradient: torch.autograd.grad(
            function(x), [x, *parameters], gradient, allow_unused=True
        )
    times = interleaved(runs, options.repeats, **({"summarise": min} if options.forward else {}))
    mode = "compiled" if options.compiled else "eager"
    what = "forward" if options.forward else "forward + backward"
    table = Table(title=f"{mode}: {options.tokens} tokens, d = {options.dim}, n = {options.streams}, fp32, nn.Linear")
    for column in ("", f"{what} ms", "saved MiB", "peer / ours"):
        table.add_column(column, justify="left" if not column else "right")
    rows = []
    for name in runs:
        ratio = times[name] / times[PEER_OF[name]] if PEER_OF.get(name) in times else None
        table.add_row(name, f"{times[name]:.3g}", f"{memory[name] / 2**20:.1f}", f"{ratio:.2f}" if ratio else "")
        row = {"implementation": name, "mode": mode, "tokens": options.tokens, "dim": options.dim}
        row |= {"streams": options.streams, "milliseconds": round(times[name], 4)}
        row |= {"saved_mib": round(memory[name] / 2**20, 2), "ratio_to_ours": round(ratio, 3) if ratio else ""}
        rows.append(row)
    Console().print(table)
    write_csv(f"connections_{mode}" + "_forward" * options.forward, rows)


if __name__ == "__main__":
    main()
