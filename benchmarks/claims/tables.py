"""Write docs/results/paper_tables.md: tables of the paper, counted and measured.

Run `python benchmarks/claims/tables.py`; half a minute. Times are those of the machine that runs it.
"""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))  # for harness.py

import torch
from cost import DIM, N, count_nodes, count_operations, log_sinkhorn
from torch.profiler import ProfilerActivity, profile
from training import norms_on_arc

from check_gradients import PAPER
from harness import interleaved, read_csv, saved_bytes
from jpmhc import HyperConnection
from jpmhc.manifolds import birkhoff
from manifolds import doubly_stochastic, gradient_errors, logits, residual_and_error

PAGE = Path(__file__).parents[2] / "docs" / "results" / "paper_tables.md"
TOKENS = 1000


def render_table(head: list[str], rows: list[list[str]]) -> str:
    """Return a table in Markdown."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(row) + " |" for row in lines) + "\n"


def gauss_seidel_table() -> str:
    """Table gs-convergence: printed and measured residuals and errors."""
    printed = {
        1: ("7.5e-1", "43.2"),
        2: ("5.6e-1", "28.1"),
        4: ("3.2e-1", "11.5"),
        8: ("1.0e-1", "2.8"),
        16: ("1.0e-2", "0.08"),
        32: ("1.0e-4", "< 0.001"),
    }
    rows = []
    for steps, (residual, error) in printed.items():
        row = [str(steps), residual, f"{error} %"]
        for scale in (1.0, 2.0, 4.0):
            found = residual_and_error(scale, steps)
            worst = float(gradient_errors(doubly_stochastic(scale, 1000), steps).quantile(0.99))
            row.append(f"{found[0]:.0e}, {found[1]:.1e} ({worst:.1e})")
        rows.append(row)
    head = ["k", "residual, paper", "error, paper", "scale 1", "scale 2", "scale 4"]
    return render_table(head, rows)


def sinkhorn_table() -> str:
    """Table sinkhorn-complexity: nodes, operations, memory, time and accuracy of three backward passes."""
    x = logits(1.0, TOKENS).float().requires_grad_(True)
    upstream = torch.randn(x.shape, generator=torch.Generator().manual_seed(1))
    forms = {
        "unrolled, as printed": log_sinkhorn,
        "implicit, Gauss–Seidel": lambda value: birkhoff.project(value, gradient="gauss_seidel"),
        "implicit, direct": birkhoff.project,
    }
    calls = {name: lambda form=form: torch.autograd.grad(form(x), x, upstream) for name, form in forms.items()}
    times = interleaved(calls)
    truth = torch.autograd.grad(birkhoff.project(x.double(), 2000), x, upstream.double())[0]
    rows = []
    for name, form in forms.items():
        result = form(x)
        nodes = count_nodes(result)
        with profile(activities=[ProfilerActivity.CPU]) as found:
            (gradient,) = torch.autograd.grad(result, x, upstream)
        operations = sum(event.count for event in found.key_averages() if event.key.startswith("aten::"))
        error = float((gradient - truth).norm() / truth.norm())
        kept = saved_bytes(lambda form=form: form(x)) / TOKENS
        rows.append([name, str(nodes), str(operations), f"{kept:.0f}", f"{times[name]:.2f}", f"{error:.0e}"])
    head = ["form", "autograd nodes", "operations", "bytes kept, a matrix", "ms", "gradient's error"]
    return render_table(head, rows)


def gradient_table() -> str:
    """Section 7.1: gradient norms of check_gradients.py, means over the second half of its runs."""
    rows = []
    for mixer, printed in PAPER.items():
        cells = ["–" if number is None else f"{number:.2f}" for number in printed]
        rows.append([mixer, "the paper's average", *cells, "", ""])
        for form, gates in (("paper", "its own"), ("exact", "the same for all")):
            means = norms_on_arc(mixer, form)
            each = ", ".join(f"{value:.2f}" for name, value in means.items() if name.startswith("network"))
            norms = (f"{means[name]:.2f}" for name in ("gradient_norm", "largest_layer"))
            rows.append(["", gates, *norms, each, f"{means['lm_loss']:.2f}"])
    return render_table(["variant", "gates and norm", "all", "largest layer", "the four connections", "loss"], rows)


def compute_table() -> str:
    """Table compute: floating-point operations and bytes of a token, and times."""
    printed = {"sinkhorn": (320, 256), "cayley": (128, 128), "grassmann": (8, 64)}
    cases = {"sinkhorn": "sinkhorn", "cayley": "cayley, matrix read and write", "grassmann": "grassmann"}
    stored = {
        row["case"]: row
        for row in read_csv("kernels-512")
        if row["implementation"] == "fused" and row["what"] == "forward+backward"
    }
    rows = []
    for name, part in count_operations().items():
        row = stored[cases[name]]
        moved = float(row["ms"]) * 1e-3 * float(row["tb_per_s"]) * 1e12 / float(row["tokens"])
        rows.append(
            [
                name,
                f"{printed[name][0]} + {printed[name][1]}",
                f"{part['forward']} + {part['backward']}",
                f"{part['logits']:,} + {2 * part['logits']:,}",
                f"{round(moved, -2):,.0f}",
                f"{_time_connection(name) / TOKENS * 1e3:.1f}",
                f"{float(row['ms']) * 1e6 / float(row['tokens']):.1f}",
            ]
        )
    head = [
        "variant",
        "printed",
        "mixer, counted",
        "logits, counted",
        "bytes moved, bfloat16",
        "µs, one CPU core",
        "ns, H200",
    ]
    return render_table(head, rows)


def _time_connection(mixer: str) -> float:
    """Return the milliseconds of a connection's forward and backward pass over all tokens."""
    matrices = mixer == "cayley"
    gate = "softmax_matrix" if matrices else "softmax"
    block = HyperConnection(torch.nn.Identity(), DIM, N, mixer, index=0, read=gate, write=gate, kernels="reference")
    x = torch.randn(TOKENS, N, DIM, requires_grad=True)
    return interleaved({"": lambda: block(x).sum().backward()}, repeats=5, warm_up=1)[""]


def main() -> None:
    """Measure and write the page."""
    torch.set_num_threads(1)
    PAGE.write_text(
        f"""# Four tables of the paper, counted and measured

Written by `python benchmarks/claims/tables.py`. n = 4, d = 512; random logits are normal with the scale given.

## Table gs-convergence: Gauss–Seidel for Sinkhorn's gradient

Median of 1000 matrices: residual relative to the first, relative error of the gradient (and its 99th percentile). The
paper's residuals are 0.75^k, the bound it states; the true rate is σ₂(P)², which differs from matrix to matrix.

{gauss_seidel_table()}
## Table sinkhorn-complexity: three backward passes

{TOKENS} matrices in float32 with logits of scale 1, T = 20, one CPU core of a busy machine; the error is against the
gradient of the converged matrix. Autograd nodes and operations of the backward pass (views and nested calls included)
are counted for one call, whatever the number of matrices; the paper says 128,000 nodes and about 20 kernels.

{sinkhorn_table()}
## Table compute: operations and bytes of one token

Forward + backward. "Printed" are the paper's numbers, "mixer" counts every addition, multiplication and function of
the map onto the manifold, "logits" the linear map from the streams to the logits (24, 48 and 16 of them). Bytes and the
last column belong to the fused kernels with exact projections (`benchmarks/results/kernels-512.csv`); the paper's
forms, cases of `benchmarks/bench_kernels.py`, have not been timed on a GPU. The mixer is a hundredth of the module, and
on the GPU the time goes with the bytes.

{compute_table()}
## Section 7.1: norms of gradients

Norm of all gradients but the puzzle table's, before clipping, and of each layer; means over the second half of 150
steps of ARC on one CPU core (`python benchmarks/check_gradients.py`; the beginning of that file has the commands). The
model is the preset `paper` at d = 64, with 16 rows per step, grids up to 10 × 10 and a learning rate of 1e-3. The
paper's averages are over 111,000 (Grassmann) to 516,000 steps at d = 512 with 768 rows. Those take days of eight GPUs:
they have not been measured here. One seed, and tenths of a run differ by a factor of up to four: what can be read is
that Sinkhorn's norms are not four times Cayley's at the beginning of a small run, with either gates.

{gradient_table()}"""
    )
    print(f"wrote {PAGE}")


if __name__ == "__main__":
    main()
