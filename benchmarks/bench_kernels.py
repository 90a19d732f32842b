"""The fused kernels on a CUDA device: right first, then time, bytes per second, share of the memory bound, and memory.

    python benchmarks/bench_kernels.py [--tokens 176128] [--dim 512] [--streams 4] [--peers] [--compiled] [--profile]

The sublayer is the identity. The bound is the bytes that must move (each tensor once: (3n+2)·d numbers a token forward,
(8n+5)·d forward and backward, (2n+2)·d for a write fused with the next read, (5n+5)·d with its gradients) at the rate
that a copy reaches here. A case whose results or gradients are not right against float64, or whose replayed CUDA graph
gives other bits than eager runs, is not timed, and the script ends with an error.
Times are of CUDA-graph replays; the eager time, host included, stands beside them. In the same process `--peers` times
the connections of liger-kernel (LigerMHC) and hyper-connections (mHC, compiled) that are installed, eager and not
checked, and `--compiled` the PyTorch form of some of ours under torch.compile.
"""

import argparse
import functools
import gc
import importlib.util
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from harness import RESULTS, captured, milliseconds, write_csv
from jpmhc import mixers
from jpmhc.connections import fused, gates, reference
from jpmhc.kernels import Spec, make_spec

# Every mixer of the registry as its name stands for it, and cases of their own: the mixer, settings of the connection.
Case = tuple[Callable[[int], mixers.Mixer], dict]
CASES: dict[str, Case] = {
    name: ((lambda n, name=name: mixers.make_mixer(name, n)), {}) for name in ["cayley", "sinkhorn", *mixers.MIXERS]
} | {
    "cayley, 2 iterations": (lambda n: mixers.Cayley(n, iterations=2), {}),
    "cayley, matrix read and write": (mixers.Cayley, {"read": "softmax_matrix", "write": "softmax_matrix"}),
    "cayley, as in the paper": (
        lambda n: mixers.Cayley(n, iterations=2),
        {"norm": "layer", "read": "softmax_matrix", "write": "softmax_matrix"},
    ),
    "sinkhorn, as in the paper": (
        lambda n: mixers.Sinkhorn(n, gradient="gauss_seidel"),
        {"norm": "rms", "read": "sigmoid", "write": "sigmoid"},
    ),
    "grassmann, as in the paper": (
        mixers.Grassmann,
        {"norm": "layer", "read": "softmax_matrix", "write": "softmax_matrix"},
    ),
    "cayley, post-norm": (mixers.Cayley, {"post_norm": True}),
    "cayley, as in the recursive model": (mixers.Cayley, {"norm": "rms", "write": "sigmoid", "post_norm": True}),
}
# Also timed as a write fused with the next read, and beside their PyTorch form.
PAIRS = ("cayley", "sinkhorn", "cayley, post-norm", "cayley, as in the recursive model")
ALLOWED = (8e-3, 2e-2)  # relative error of results and gradients in bfloat16; see tests/kernels/connection_cases.py


def spec_of(case: str, n: int, d: int) -> Spec | str:
    """Describe the case to the kernels, or say why it cannot be."""
    make, settings = CASES[case]
    mixer = mixers.MIXERS.get(case)
    if mixer is not None and (reason := mixer.why_not(n)) is not None:
        return reason
    form = make(n).triton_form()
    return form if isinstance(form, str) else make_spec(form, d, **settings)


def draw(spec: Spec, tokens: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Streams, weight, bias and the output's gradient."""
    width = spec.n * spec.d
    x = torch.randn(tokens, spec.n, spec.d, device="cuda").bfloat16().requires_grad_()
    weight = (torch.randn(spec.logits, width, device="cuda") / width**0.5).requires_grad_()
    bias = (0.3 * torch.randn(spec.logits, device="cuda")).requires_grad_()
    return x, weight, bias, torch.randn(tokens, spec.n, spec.d, device="cuda").bfloat16()


def connection(x: Tensor, weight: Tensor, bias: Tensor, spec: Spec) -> Tensor:
    h, state = fused.read_streams(x, weight, bias, spec)
    return fused.write_streams(h, state)


def read_plainly(x: Tensor, weight: Tensor, bias: Tensor, spec: Spec, mixer: mixers.Mixer) -> tuple:
    """The sublayer's input, the write weights and the skip, by the package's reference."""
    logits = reference.compute_logits(x, spec.scale * weight, spec.norm) + bias
    read, write, mix = logits.split([spec.read_logits, spec.write_logits, spec.mixer.logits], -1)
    weights = gates.READS[spec.read](read / spec.temperature, spec.n)
    h = reference.gather(x, weights)
    return h, gates.WRITES[spec.write](write / spec.temperature, spec.n), mixer(mix)


def write_plainly(x: Tensor, y: Tensor, write: Tensor, skip: Tensor, spec: Spec) -> Tensor:
    out = reference.scatter(x, y, write, skip)
    return reference.normalise_streams(out) if spec.post_norm else out


def plain(mixer: mixers.Mixer) -> Callable[[Tensor, Tensor, Tensor, Spec], Tensor]:
    """The reference as a function like `connection`."""

    def run(x: Tensor, weight: Tensor, bias: Tensor, spec: Spec) -> Tensor:
        h, write, skip = read_plainly(x, weight, bias, spec, mixer)
        return write_plainly(x, h, write, skip, spec)

    return run


def check(spec: Spec, mixer: mixers.Mixer) -> float:
    """The largest relative error of the result (against its allowance) and of the gradients."""
    x, weight, bias, grad = draw(spec, 1001)
    out = connection(x, weight, bias, spec)
    found = (out, *torch.autograd.grad(out, (x, weight, bias), grad))
    leaves = [t.detach().double().requires_grad_() for t in (x, weight, bias)]
    out = plain(mixer)(*leaves, spec)
    wanted = (out, *torch.autograd.grad(out, leaves, grad.double()))
    # A nearly singular frame multiplies the rounding of the weight.
    slack = 5 if isinstance(mixer, mixers.Grassmann) else 1
    return max(relative_error(a, b, slack * ALLOWED[i > 0]) for i, (a, b) in enumerate(zip(found, wanted)))


def check_pair(spec: Spec, mixer: mixers.Mixer, joined: bool, delayed: bool) -> float:
    """The relative error of the next sublayer's input after a write and a read."""
    x, weight, bias, _ = draw(spec, 1001)
    leaves = [t.detach().double() for t in (x, weight, bias)]
    streams = plain(mixer)(*leaves, spec)
    if delayed:
        wanted = fused.read_streams(x, weight, bias, spec)[1].gather(streams)
    else:
        wanted, _, _ = read_plainly(streams, *leaves[1:], spec, mixer)
    return relative_error(linked(x, weight, bias, spec, 1, joined, delayed), wanted, 2 * ALLOWED[0])


def relative_error(found: Tensor, wanted: Tensor, allowed: float) -> float:
    error = float((found.double() - wanted).detach().norm() / wanted.detach().norm())
    if not error <= allowed:
        raise SystemExit(f"relative error {error:.1e} is over {allowed:.0e}: this case was not timed")
    return error


def extra_memory(run: Callable[[], object], kept: int) -> float:
    """Peak minus what was there and the `kept` bytes of outputs and gradients, in MiB."""
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before - kept) / 2**20


def replay_equals_eager(spec: Spec) -> bool:
    """Whether a captured forward and backward gives the bits of an eager one."""
    _, both = setup(spec, 4099, connection)
    graph, result = captured(both)
    graph.replay()
    torch.cuda.synchronize()
    return all(torch.equal(a, b) for a, b in zip(result, both()))


def setup(spec: Spec, tokens: int, function: Callable) -> tuple[Callable[[], object], Callable[[], object]]:
    """Forward, and forward + backward."""
    x, weight, bias, grad = draw(spec, tokens)

    def forward() -> Tensor:
        with torch.no_grad():
            return function(x, weight, bias, spec)

    def both() -> object:
        return torch.autograd.grad(function(x, weight, bias, spec), (x, weight, bias), grad)

    return forward, both


def linked(
    x: Tensor, weight: Tensor, bias: Tensor, spec: Spec, links: int, joined: bool, delayed: bool = False
) -> Tensor:
    """The sublayer's input after `links` connections, forward."""
    with torch.no_grad():
        h, state = fused.read_streams(x, weight, bias, spec)
        for _ in range(links):
            if joined:
                _, h, state = fused.write_read_streams(h, state, weight, bias, spec, delayed)
            else:
                h, state = fused.read_streams(fused.write_streams(h, state), weight, bias, spec)
        return h


def chain(spec: Spec, tokens: int, links: int, joined: bool, delayed: bool = False) -> Callable[[], Tensor]:
    x, weight, bias, _ = draw(spec, tokens)
    return lambda: linked(x, weight, bias, spec, links, joined, delayed)


def chain_with_gradients(spec: Spec, tokens: int, links: int, delayed: bool = False) -> Callable[[], object]:
    """Forward and backward of a read, `links` writes with the next reads, and a write."""
    x, weight, bias, grad = draw(spec, tokens)

    def both() -> object:
        h, state = fused.read_streams(x, weight, bias, spec)
        for _ in range(links):
            _, h, state = fused.write_read_streams(h, state, weight, bias, spec, delayed)
        return torch.autograd.grad(fused.write_streams(h, state), (x, weight, bias), grad)

    return both


def bit_equal(spec: Spec) -> bool:
    """Whether two runs of the gradients agree in every bit."""
    x, weight, bias, grad = draw(spec, 4099)
    runs = [torch.autograd.grad(connection(x, weight, bias, spec), (x, weight, bias), grad) for _ in range(2)]
    return all(torch.equal(a, b) for a, b in zip(*runs))


def peers(n: int, d: int, tokens: int) -> dict[str, tuple[torch.nn.Module, Tensor]]:
    """Connections of other packages around the identity, with their streams."""
    found: dict[str, tuple[torch.nn.Module, Tensor]] = {}
    if importlib.util.find_spec("liger_kernel") is not None:
        from liger_kernel.transformers import LigerMHC

        liger = LigerMHC(torch.nn.Identity(), hc=n, c=d, phi_dtype=torch.bfloat16).cuda()
        found["liger-kernel LigerMHC"] = (liger, torch.randn(1, tokens, n, d, device="cuda").bfloat16())
    if importlib.util.find_spec("hyper_connections") is not None:
        from hyper_connections import mHC

        manifold = mHC(n, dim=d, branch=torch.nn.Identity(), layer_index=0).cuda().bfloat16()
        # This package keeps the streams in the batch: [batch * n, sequence, d].
        found["hyper-connections mHC"] = (torch.compile(manifold), torch.randn(n, tokens, d, device="cuda").bfloat16())
    return found


def copy_rate() -> float:
    """Bytes a second, read and written, of a large copy."""
    source = torch.randn(2**29, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.nbytes / milliseconds(lambda: target.copy_(source), device="cuda") * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=176128)
    parser.add_argument("--dim", type=int, default=512)
    parser.add_argument("--streams", type=int, default=4)
    parser.add_argument(
        "--cases", nargs="+", default=list(CASES), choices=list(CASES), metavar="CASE", help=f"of: {'; '.join(CASES)}"
    )
    parser.add_argument("--peers", action="store_true", help="time other packages as well")
    parser.add_argument("--compiled", action="store_true", help="time the PyTorch form, compiled (a minute each)")
    parser.add_argument("--profile", action="store_true", help="time of every kernel of the first case")
    parser.add_argument("--folder", type=Path, default=RESULTS, help="where kernels-<dim>.csv goes")
    args = parser.parse_args()
    n, d, tokens = args.streams, args.dim, args.tokens
    if tokens < 1:
        parser.error(f"--tokens must be at least 1, got {tokens}")
    described = {case: spec_of(case, n, d) for case in args.cases}
    for case, reason in described.items():
        if isinstance(reason, str):
            print(f"{case} is left out: {reason}")
    specs = {case: spec for case, spec in described.items() if isinstance(spec, Spec)}
    if not specs:
        parser.error("the kernels cover none of the cases")
    if not torch.cuda.is_available():
        raise SystemExit("this benchmark needs a CUDA device")

    rate = copy_rate()
    print(f"a copy moves {rate / 1e12:.2f} TB/s")
    unit = tokens * d * 2  # bytes of one row of d numbers a token
    rows: list[dict] = []

    def report(
        case: str, implementation: str, what: str, run: Callable[[], object], units: float, kept: int, error: float
    ) -> None:
        eager, memory = milliseconds(run, device="cuda"), extra_memory(run, kept)
        graph, _ = captured(run)
        ms = milliseconds(graph.replay, device="cuda")
        add(case, implementation, what, ms, eager, units, memory, error)

    def add(
        case: str,
        implementation: str,
        what: str,
        ms: float,
        eager: float,
        units: float,
        memory: float | None,
        error: float | None,
    ) -> None:
        moved = units * unit
        rows.append(
            {
                "case": case, "implementation": implementation, "what": what, "tokens": tokens, "dim": d, "streams": n,
                "ms": round(ms, 4), "eager_ms": round(eager, 4), "tb_per_s": round(moved / ms / 1e9, 3),
                "percent_of_bound": round(100 * moved / rate / ms * 1e3, 1),
                "extra_mib": "" if memory is None else round(memory, 1), "stream_mib": round(n * unit / 2**20, 1),
                "error": "" if error is None else f"{error:.1e}",
            }
        )  # fmt: skip
        row = rows[-1]
        print(
            f"{case:30s} {implementation:22s} {what:17s} {ms:7.3f} ms (eager {eager:.3f}), "
            f"{row['percent_of_bound']:5.1f} % of bound"
            + ("" if memory is None else f", extra {memory:6.1f} MiB")
            + ("" if error is None else f", error {error:.1e}"),
            flush=True,
        )

    if args.peers:
        for name, (block, x) in peers(n, d, tokens).items():
            x.requires_grad_()
            grad = torch.randn_like(x)
            parameters = [p for p in block.parameters() if p.requires_grad]

            def ahead(block=block, x=x) -> Tensor:
                with torch.no_grad():
                    return block(x)

            def both(block=block, x=x, grad=grad, parameters=parameters) -> object:
                return torch.autograd.grad(block(x), [x, *parameters], grad, allow_unused=True)

            for what, run, units, kept in (
                ("forward", ahead, 3 * n + 2, n * unit),
                ("forward+backward", both, 8 * n + 5, 2 * n * unit),
            ):
                ms = milliseconds(run, device="cuda")
                add("sinkhorn", name, what, ms, ms, units, extra_memory(run, kept), None)
            del block, x, grad, parameters, ahead, both, run
            torch.cuda.empty_cache()
    for case, spec in specs.items():
        mixer = CASES[case][0](n).cuda()
        error = check(spec, mixer.double())
        if not replay_equals_eager(spec):
            raise SystemExit(f"{case}: a replayed graph gives other bits than an eager run: this case was not timed")
        implementations: dict[str, Callable] = {"fused": connection}
        if args.compiled and case in PAIRS:
            implementations["compiled"] = torch.compile(plain(mixer.float()))
        for name, function in implementations.items():
            forward, both = setup(spec, tokens, function)
            report(case, name, "forward", forward, 3 * n + 2, n * unit, error)
            # The output (its gradient is an input here) and the streams' gradient are nobody's extra memory.
            report(case, name, "forward+backward", both, 8 * n + 5, 2 * n * unit, error)
            del forward, both
            torch.cuda.empty_cache()
    for case, spec in specs.items():
        if case in PAIRS:
            links = 4
            for name, make, units in (
                ("write→read", functools.partial(chain, joined=True), 2 * n + 2),
                ("write, read", functools.partial(chain, joined=False), 2 * n + 2),
                ("write→read, both", chain_with_gradients, 5 * n + 5),
                ("delayed read", functools.partial(chain, joined=True, delayed=True), 2 * n + 2),
                ("delayed read, both", functools.partial(chain_with_gradients, delayed=True), 5 * n + 5),
            ):
                mixer, joined = CASES[case][0](n).cuda().double(), name != "write, read"
                error = check_pair(spec, mixer, joined, name.startswith("delayed"))
                runs = [make(spec, tokens, count) for count in (1, 1 + links)]
                eager = [milliseconds(run, device="cuda") for run in runs]
                ms = [milliseconds(captured(run)[0].replay, device="cuda") for run in runs]
                each = [(times[1] - times[0]) / links for times in (ms, eager)]
                add(case, "fused", name, *each, units, None, error)
                del runs
                torch.cuda.empty_cache()
            print(f"{case}: two runs bit-equal: {bit_equal(spec)}")
    if args.profile:
        profile(next(iter(specs.values())), tokens)
    write_csv(f"kernels-{d}", rows, "cuda", args.folder)


def profile(spec: Spec, tokens: int) -> None:
    """Device time of every kernel of one forward and backward."""
    _, both = setup(spec, tokens, connection)
    both()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as trace:
        for _ in range(5):
            both()
        torch.cuda.synchronize()
    for event in sorted(trace.key_averages(), key=lambda e: -e.device_time_total)[:14]:
        print(f"  {event.device_time_total / 5e3:8.4f} ms  {event.count // 5:3d} ×  {event.key[:80]}")


if __name__ == "__main__":
    main()
