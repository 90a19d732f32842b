"""Is one kernel for the gradients of a write and of the next read faster than two kernels, and is it right?

    python benchmarks/check_joined_gradient.py [--seconds 170] [--folder OUT] [--once]

Checks every variant of `_write_read_backward` against float64 and times it in turns with the two kernels; then the
fastest variant within chains of connections and within a GPT. `--once` launches the default once, for a profiler.
"""

# ruff: noqa: E501, BLE001

import argparse
import importlib.util
import inspect
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
import triton
import triton.language as tl
from torch import Tensor

from harness import interleaved
from jpmhc import mixers
from jpmhc.connections import fused
from jpmhc.kernels import make_spec, read, replay, write_read
from jpmhc.kernels.launch import Launcher, ceil_div, make_buffer, padded, split_buffer
from jpmhc.kernels.write import differentiate_write
from jpmhc.kernels.write_read import _split

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPE = torch.bfloat16 if DEVICE == "cuda" else torch.float32  # the interpreter has no bfloat16 arithmetic

START = time.perf_counter()


@triton.jit
def flat(
    x_RD, y_TD, old_TC, grad_RD, grad_h_TD, new_TC, w_PW, scaled_TP, level_and_along_T2,
    grad_z_RD, grad_y_TD, grad_old_TC, T,
    N: tl.constexpr, D: tl.constexpr, KP: tl.constexpr, PRECISION: tl.constexpr, SPLIT: tl.constexpr,
    GROUPS: tl.constexpr, BD: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """The same with matrices over all rows of the tile, by the instructions of a warp group alone."""
    R: tl.constexpr = GROUPS * 16
    BT: tl.constexpr = R // N
    C: tl.constexpr = N * (N + 2)
    first = tl.program_id(0).to(tl.int64) * BT
    a = tl.arange(0, R)
    b = tl.arange(0, R)[None, :]
    t = tl.arange(0, BT)
    e = tl.arange(0, 2 * BT)
    q = tl.arange(0, N * KP)
    token = first + a // N
    inside = token < T
    same = ((a // N)[:, None] == b // N) & inside[:, None]
    j = (a % N)[:, None]
    level = tl.load(level_and_along_T2 + token * 2, mask=inside, other=0.0)
    along = tl.load(level_and_along_T2 + token * 2 + 1, mask=inside, other=0.0)[:, None]
    write = tl.load(old_TC + token * C + N + a % N, mask=inside, other=0.0)
    base = (token * C)[:, None]
    mixing = tl.load(new_TC + base + 2 * N + (b % N) * N + j, mask=same, other=0.0)
    mixing, mixing_rest = _split(mixing, x_RD.dtype.element_ty)
    back = (-along * tl.load(old_TC + base + 2 * N + j * N + b % N, mask=same, other=0.0)).to(x_RD.dtype.element_ty)
    of_h = ((a // N)[:, None] == e[None, :]) & inside[:, None]
    of_y = ((a // N)[:, None] == e[None, :] - BT) & inside[:, None]
    lines = tl.load(new_TC + base + j + e[None, :] * 0, mask=of_h, other=0.0)
    lines -= along * tl.load(old_TC + base + N + j + e[None, :] * 0, mask=of_y, other=0.0)
    lines, lines_rest = _split(lines, x_RD.dtype.element_ty)
    mine = inside[:, None] & (j == (q // KP)[None, :])
    spread = tl.load(scaled_TP + token[:, None] * KP + (q % KP)[None, :], mask=mine, other=0.0)
    weight = (q % KP) * (N * D) + (q // KP) * D
    line = first + e % BT
    along_x = tl.zeros([R, R], tl.float32)
    along_lines = tl.zeros([R, 2 * BT], tl.float32)
    for start in tl.range(0, D, BD, num_stages=STAGES):
        c = start + tl.arange(0, BD)
        within = (c < D)[None, :]
        rows = (first * N + a)[:, None] * D + c[None, :]
        g = tl.load(grad_RD + rows, mask=inside[:, None] & within, other=0.0)
        x = tl.load(x_RD + rows, mask=inside[:, None] & within, other=0.0)
        place = line[:, None] * D + c[None, :]
        both = tl.where((e < BT)[:, None], grad_h_TD + place, y_TD + place)
        l = tl.load(both, mask=(line < T)[:, None] & within, other=0.0)
        w = tl.load(w_PW + weight[:, None] + c[None, :], mask=within, other=0.0)
        gz = tl.dot(spread, w, input_precision=PRECISION)
        gz = tl.dot(mixing, g, gz, input_precision=PRECISION)
        gz = tl.dot(back, x, gz, input_precision=PRECISION)
        gz = tl.dot(lines, l, gz, input_precision=PRECISION)
        if SPLIT:
            gz = tl.dot(mixing_rest, g, gz, input_precision=PRECISION)
            gz = tl.dot(lines_rest, l, gz, input_precision=PRECISION)
        rounded = (gz + level[:, None]).to(grad_z_RD.dtype.element_ty)
        tl.store(grad_z_RD + rows, rounded, mask=inside[:, None] & within)
        along_x = tl.dot(rounded, tl.trans(x), along_x, input_precision=PRECISION)
        along_lines = tl.dot(rounded, tl.trans(l), along_lines, input_precision=PRECISION)
        gy = tl.sum(tl.reshape(write[:, None] * rounded.to(tl.float32), [BT, N, BD]), axis=1)
        mask = (first + t < T)[:, None] & within
        tl.store(grad_y_TD + (first + t)[:, None] * D + c[None, :], gy.to(grad_y_TD.dtype.element_ty), mask=mask)
    tl.store(grad_old_TC + base + 2 * N + j * N + b % N, along_x, mask=same)
    tl.store(grad_old_TC + base + N + j + e[None, :] * 0, along_lines, mask=of_y)
    tl.store(grad_old_TC + token * C + a % N, tl.zeros([R], tl.float32), mask=inside)


def rewritten(name: str, *changes: tuple[str, str]) -> triton.JITFunction:
    """The package's kernel with parts of its source replaced."""
    source = inspect.getsource(write_read)
    for old, new in changes:
        assert old in source, old
        source = source.replace(old, new)
    path = Path(tempfile.mkdtemp()) / f"{name}.py"
    path.write_text(source.replace('Pass("write_read"', f'Pass("write_read_{name}"'))
    module = importlib.util.module_from_spec(spec := importlib.util.spec_from_file_location(name, path))
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module._write_read_backward


def once_read(kernel: str) -> triton.JITFunction:
    """Evict the tensors that are read once first, and the weight last."""
    first = 'mask=inside & within, other=0.0, eviction_policy="evict_first")'
    return rewritten(
        kernel,
        ("mask=inside & within, other=0.0)", first),
        ("mask=known & within, other=0.0)", 'mask=known & within, other=0.0, eviction_policy="evict_first")'),
        ("mask=(c < D)[None, :], other=0.0)\n        gz_GRD", 'mask=(c < D)[None, :], other=0.0, eviction_policy="evict_last")\n        gz_GRD'),
    )  # fmt: skip


MAIN = write_read._write_read_backward
EVICTING = once_read("evicting")
# Kernel, groups of 16 rows, width of a slice, stages, warps, most registers (0: any), whether H and r are split.
VARIANTS = {
    "main g4 d64 s3": (MAIN, 4, 64, 3, 4, 0, True),
    "main g4 d64 s2": (MAIN, 4, 64, 2, 4, 0, True),
    "main g4 d64 s2 r168": (MAIN, 4, 64, 2, 4, 168, True),
    "main g4 d32 s3": (MAIN, 4, 32, 3, 4, 0, True),
    "main g4 d32 s4 r128": (MAIN, 4, 32, 4, 4, 128, True),
    "main g8 d64 s2": (MAIN, 8, 64, 2, 8, 0, True),
    "main g8 d32 s4": (MAIN, 8, 32, 4, 8, 0, True),
    "main g4 d64 s3 whole": (MAIN, 4, 64, 3, 4, 0, False),
    "main g4 d64 s3 evict": (EVICTING, 4, 64, 3, 4, 0, True),
    "flat g4 d64 s2": (flat, 4, 64, 2, 4, 0, True),
    "flat g4 d32 s4": (flat, 4, 32, 4, 4, 0, True),
    "flat g4 d64 s3": (flat, 4, 64, 3, 4, 0, True),
}


def make(variant: str, spec: object, dtype: torch.dtype = torch.bfloat16) -> tuple[Launcher, int]:
    kernel, groups, width, stages, warps, registers, split = VARIANTS[variant]
    constants = {"N": spec.n, "D": spec.d, "KP": padded(spec.logits), "PRECISION": "tf32", "SPLIT": split}
    options = {"num_warps": warps} | ({"maxnreg": registers} if registers else {})
    return Launcher(kernel, **constants, GROUPS=groups, BD=width, STAGES=stages, **options), groups * 16 // spec.n


def left() -> float:
    return ARGUMENTS.seconds - (time.perf_counter() - START)


def say(section: str, **values: object) -> None:
    print(
        f"[{time.perf_counter() - START:5.1f} s] {section}: " + ", ".join(f"{k} {v}" for k, v in values.items()),
        flush=True,
    )
    RESULTS.append({"section": section, **values})
    if ARGUMENTS.folder:
        (ARGUMENTS.folder / "joined.json").write_text(json.dumps(RESULTS, indent=1, default=str))


class Problem:
    """Random inputs of the two gradients at one junction, and their outputs."""

    def __init__(self, n: int, d: int, tokens: int) -> None:
        self.spec = spec = make_spec(mixers.Cayley(n).triton_form(), d)
        self.tokens, kp, rand = tokens, padded(spec.logits), lambda *shape: torch.randn(*shape, device=DEVICE)
        self.x, self.grad, self.z = (rand(tokens, n, d).to(DTYPE) for _ in range(3))
        self.y, self.grad_h = (rand(tokens, d).to(DTYPE) for _ in range(2))
        self.old, self.new = (rand(tokens, spec.coefficients) * 0.5 for _ in range(2))
        layout = ((kp * n * d, DTYPE), (tokens * kp, DTYPE), (tokens * 2, torch.float32))
        self.parts = split_buffer(make_buffer(layout, self.x), layout)
        self.w, self.scaled, self.level_and_along = [part.tensor() for part in self.parts]
        for tensor, factor in ((self.w, 0.05), (self.scaled, 1.0), (self.level_and_along, 0.1)):
            tensor.copy_(rand(*tensor.shape) * factor)
        self.outputs = [torch.empty_like(t) for t in (self.x, self.y, self.old)]

    def two_kernels(self) -> list[Tensor]:
        w, scaled, ends = self.parts
        gz = read._differentiate_streams(self.z, self.grad, self.grad_h, w, self.new, scaled, ends, self.spec, False)
        _, gy, gc = self.outputs
        differentiate_write(self.x, self.y, self.old, gz, self.spec, False, False, None, gy, gc)
        return [gz, gy, gc]

    def one_kernel(self, launcher: Launcher, block: int) -> list[Tensor]:
        grid = (ceil_div(self.tokens, block),)
        given = (self.x, self.y, self.old, self.grad, self.grad_h, self.new, *self.parts, *self.outputs, self.tokens)
        launcher.launch(grid, *given)
        return self.outputs

    def truth(self) -> list[Tensor]:
        n, d, t = self.spec.n, self.spec.d, self.tokens
        wide = [v.double() for v in (self.x, self.y, self.grad, self.grad_h, self.old, self.new)]
        x, y, g, gh, old, new = wide
        w, s, ends = self.w.double().view(-1, n * d), self.scaled.double().view(t, -1), self.level_and_along.double()
        skip, write, ends = old[:, 2 * n :].view(t, n, n), old[:, n : 2 * n, None], ends.view(t, 2, 1, 1)
        gz = new[:, 2 * n :].view(t, n, n).mT @ g + new[:, :n, None] * gh[:, None] + (s @ w).view(t, n, d)
        gz += ends[:, 0] - ends[:, 1] * (skip @ x + write * y[:, None])
        weights = torch.cat([torch.zeros(t, n, device=DEVICE), (gz @ y[..., None])[..., 0], (gz @ x.mT).flatten(1)], 1)
        return [gz, (write * gz).sum(1), weights]


def check(variant: str) -> str:
    errors = []
    for n, d, tokens in ((4, 200, 1001), (2, 512, 333)):
        problem = Problem(n, d, tokens)
        for output in problem.outputs:
            output.fill_(float("nan"))
        found = problem.one_kernel(*make(variant, problem.spec))
        torch.cuda.synchronize()
        errors += [float((a.double() - b).norm() / b.norm()) for a, b in zip(found, problem.truth())]
    if not all(error <= 8e-3 for error in errors):
        raise ValueError(f"wrong: {errors}")
    return " ".join(f"{error:.1e}" for error in errors[:3])


def graph_of(run: object) -> object:
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay


def time_kernels(n: int, d: int, tokens: int, variants: list[str]) -> dict[str, float]:
    problem = Problem(n, d, tokens)
    runs = {"two kernels": graph_of(problem.two_kernels)}
    for variant in variants:
        launched = make(variant, problem.spec)
        runs[variant] = graph_of(lambda launched=launched: problem.one_kernel(*launched))
    runs["two kernels again"] = runs["two kernels"]
    ms = interleaved(runs, 15, 3, DEVICE)
    for name, value in ms.items():
        say(f"n={n} d={d} T={tokens} {name}", ms=round(value, 4), ratio=round(value / ms["two kernels"], 3))
    return ms


LAUNCHERS: dict[tuple, tuple[Launcher, int]] = {}


def use(variant: str | None) -> None:
    """Let the package take one kernel in this variant, or two kernels."""

    def launcher(spec: object, dtype: torch.dtype) -> tuple[Launcher, int]:
        if (variant, spec) not in LAUNCHERS:
            LAUNCHERS[variant, spec] = make(variant, spec)
        return LAUNCHERS[variant, spec]

    replay._recordings.clear()
    write_read.one_gradient_kernel_pays = lambda *given: variant is not None
    write_read._backward_launcher = launcher


def time_chain(d: int, tokens: int, variant: str, links: int = 4) -> None:
    """A read, four writes with the next reads, and a write: forward and backward."""
    spec = make_spec(mixers.Cayley(4).triton_form(), d)
    width = 4 * d
    x = torch.randn(tokens, 4, d, device=DEVICE).bfloat16().requires_grad_()
    weight = (torch.randn(spec.logits, width, device=DEVICE) / width**0.5).requires_grad_()
    bias = (0.3 * torch.randn(spec.logits, device=DEVICE)).requires_grad_()
    grad = torch.randn_like(x)

    def both() -> tuple[Tensor, ...]:
        h, state = fused.read_streams(x, weight, bias, spec)
        for _ in range(links):
            _, h, state = fused.write_read_streams(h, state, weight, bias, spec)
        return torch.autograd.grad(fused.write_streams(h, state), (x, weight, bias), grad)

    runs, found = {}, {}
    for name, which in (("two kernels", None), ("one kernel", variant)):
        use(which)
        for _ in range(3):
            found[name] = both()
        runs[name] = graph_of(both)
    differences = [
        float((a.double() - b.double()).norm() / b.double().norm())
        for a, b in zip(found["one kernel"], found["two kernels"])
    ]
    ms = interleaved(runs, 12, 3, DEVICE)
    say(f"chain of {links + 1}, d={d}, T={tokens}", **{k: round(v, 3) for k, v in ms.items()},
        saved_per_link=round((ms["two kernels"] - ms["one kernel"]) / links, 4),
        ratio=round(ms["one kernel"] / ms["two kernels"], 3), differences=[f"{e:.1e}" for e in differences])  # fmt: skip


def time_gpt(size: str, mode: str, variant: str) -> None:
    import bench_transformer as gpt

    torch._dynamo.config.cache_size_limit = 64
    shape = gpt.SIZES[size]
    tokens = torch.randint(gpt.VOCABULARY, (shape.batch, shape.length), device=DEVICE)
    plain = gpt.try_model(shape, "plain", mode, tokens)
    use(None)
    ours = gpt.try_model(shape, "cayley", mode, tokens)
    times: dict[str, list[float]] = {"plain": [], "two kernels": [], "one kernel": []}
    for _ in range(4):
        for name, step in (("plain", plain.step), ("two kernels", ours.step), ("one kernel", ours.step)):
            if name != "plain":
                use(variant if name == "one kernel" else None)
            for k in range(8):
                begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                begin.record()
                step()
                end.record()
                torch.cuda.synchronize()
                if k >= 3:
                    times[name].append(begin.elapsed_time(end))
    ms = {name: statistics.median(values) for name, values in times.items()}
    say(f"GPT {size} {mode}", **{k: round(v, 2) for k, v in ms.items()},
        over_plain=[round(100 * (ms[k] / ms["plain"] - 1), 1) for k in ("two kernels", "one kernel")],
        peak_gib=round(ours.peak_gib, 2), plain_gib=round(plain.peak_gib, 2), loss=round(float(ours.step()), 4))  # fmt: skip


def warm(variant: str) -> None:
    """Compile everything that the variant needs into Triton's cache."""
    check(variant)
    for n, d in ((4, 512), (4, 2048)):
        Problem(n, d, 64).one_kernel(*make(variant, make_spec(mixers.Cayley(n).triton_form(), d)))


def main() -> None:
    if ARGUMENTS.warm:
        return warm(ARGUMENTS.warm)
    if ARGUMENTS.once:
        problem = Problem(4, 512, 176128)
        for _ in range(3):
            problem.two_kernels()
            problem.one_kernel(*make(ARGUMENTS.once, problem.spec))
        return torch.cuda.synchronize()
    command = [sys.executable, __file__, "--warm"]
    compiling = [subprocess.Popen([*command, variant], stderr=subprocess.DEVNULL) for variant in VARIANTS]
    say("start", device=torch.cuda.get_device_name(), torch=torch.__version__, triton=triton.__version__)
    for process in compiling:
        try:
            process.wait(max(1, left() - 90))
        except subprocess.TimeoutExpired:
            process.kill()
    say("compiled", failed=[v for v, process in zip(VARIANTS, compiling) if process.returncode])
    right = []
    for variant in VARIANTS:
        if right and left() < 80:
            break
        try:
            say(f"right: {variant}", errors=check(variant))
            right.append(variant)
        except Exception as error:  # a variant that does not compile here is left out, and said
            say(f"WRONG: {variant}", error=f"{type(error).__name__} {str(error)[:300]}")
    ms = time_kernels(4, 512, 176128, right)
    ranked = sorted(right, key=ms.__getitem__)
    best = ranked[0]
    say("fastest", variant=best)
    (ARGUMENTS.folder or Path(".")).joinpath("best.txt").write_text(best)
    for section in (
        lambda: time_kernels(4, 2048, 44032, ranked[:4]),
        lambda: time_chain(512, 176128, best),
        lambda: time_chain(2048, 44032, best),
        lambda: time_gpt("medium", "eager", best),
        lambda: time_gpt("medium", "compiled", best),
        lambda: time_kernels(2, 512, 176128, ranked[:3]),
        lambda: time_kernels(4, 384, 16384, ranked[:3]),
        lambda: time_gpt("large", "eager", best),
    ):
        if left() < 15:
            break
        try:
            section()
        except Exception as error:  # the other sections still run
            say("FAILED", error=f"{type(error).__name__} {str(error)[:300]}")
        torch.cuda.empty_cache()
    print("finished", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=150)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--once", default="", choices=["", *VARIANTS])
    parser.add_argument("--warm", default="", choices=["", *VARIANTS])
    ARGUMENTS = parser.parse_args()
    RESULTS: list[dict] = []
    main()
