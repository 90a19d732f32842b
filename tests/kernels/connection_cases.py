"""Connections to try the kernels on, the truth about them, and how far from it they may be."""

from typing import NamedTuple

import torch
from torch import Tensor

from jpmhc import mixers
from jpmhc.connections import fused, gates, reference
from jpmhc.kernels import Spec, make_spec
from jpmhc.mixers import MIXERS, Mixer

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# ‖out - reference‖ / ‖reference‖ for the results and for the gradients. Half types: the rounding of the streams and of
# the weight that the tensor cores multiply by; the logits' scale multiplies the second.
TOLERANCE = {torch.float32: (2e-6, 2e-5), torch.float16: (2e-3, 4e-3), torch.bfloat16: (8e-3, 2e-2)}
VARIANTS = {
    "cayley, two iterations": lambda n: mixers.Cayley(n, iterations=2),
    "cayley, sharp": lambda n: mixers.Cayley(n, scale=1.0),
    "grassmann, rank 3": lambda n: mixers.Grassmann(n, 3),
    "sinkhorn, columns first": lambda n: mixers.Sinkhorn(n, iterations=7, first="columns", clamp=2.0),
    "sinkhorn, unrolled": lambda n: mixers.Sinkhorn(n, iterations=6, gradient="unrolled", clamp=2.0),
    "sinkhorn of the paper": lambda n: mixers.Sinkhorn(n, iterations=20, gradient="gauss_seidel"),
    "sinkhorn, columns first, few steps back": lambda n: mixers.Sinkhorn(
        n, iterations=7, gradient="gauss_seidel", gradient_iterations=3, first="columns", clamp=2.0
    ),
    "sinkhorn, with a tolerance": lambda n: mixers.Sinkhorn(n, tolerance=1e-3),
    "sinkhorn of DeepSeek-V4": lambda n: mixers.Sinkhorn(
        n, iterations=20, gradient="unrolled", eps=1e-6, clamp=None, first="columns", transposed=True
    ),
    "orthostochastic, two blocks": lambda n: mixers.Orthostochastic(n, 2),
}
FUSED = [name for name, mixer in MIXERS.items() if mixer.triton_form is not Mixer.triton_form]  # others: PyTorch alone
NAMES = [*FUSED, *VARIANTS]


class Case(NamedTuple):
    """A connection as the kernels see it, and the mixer that computes the truth."""

    mixer: Mixer
    spec: Spec


def make_case(name: str, n: int = 4, d: int = 24, **settings) -> Case:
    mixer = VARIANTS[name](n) if name in VARIANTS else mixers.make_mixer(name, n)
    form = mixer.triton_form()
    assert not isinstance(form, str), form
    spec = make_spec(form, d, **settings)
    assert isinstance(spec, Spec), spec
    return Case(mixer.to(DEVICE).double(), spec)


def draw(
    case: Case, tokens: int, dtype: torch.dtype, scale: float, dynamic: bool, seed: int = 0, held: int | None = None
) -> dict[str, Tensor | None]:
    """`held`: how many streams x holds; one stands for n equal ones."""
    spec = case.spec
    generator = torch.Generator().manual_seed(seed)
    width = spec.n * spec.d

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    weight = scale * normal(spec.logits, width) / width**0.5
    return {
        "x": (normal(tokens, held or spec.n, spec.d) + 0.3).to(DEVICE, dtype),
        "weight": weight.to(DEVICE) if dynamic else None,
        "bias": (normal(spec.logits) * (0.3 if dynamic else scale)).to(DEVICE),
        "sublayer": (normal(spec.d, spec.d) / spec.d**0.5).to(DEVICE),
        "grad": normal(tokens, spec.n, spec.d).to(DEVICE, dtype),
    }


def reference_read(
    x: Tensor, weight: Tensor | None, bias: Tensor, case: Case
) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor]]:
    """The connection's read by the package's own reference. x: [T, n, d]"""
    spec = case.spec
    logits = (
        bias.expand(len(x), -1)
        if weight is None
        else reference.compute_logits(x, spec.scale * weight, spec.norm, spec.eps) + bias
    )
    read, write, mix = logits.split([spec.read_logits, spec.write_logits, spec.mixer.logits], -1)
    r = gates.READS[spec.read](read / spec.temperature, spec.n) + spec.read_eps
    w = gates.WRITES[spec.write](write / spec.temperature, spec.n) * (spec.write_peak / 2) + spec.write_eps
    return reference.gather(x, r), (r, w, case.mixer(mix))


def reference_write(x: Tensor, y: Tensor, state: tuple[Tensor, Tensor, Tensor], case: Case) -> Tensor:
    out = reference.scatter(x, y, *state[1:])
    return reference.normalise_streams(out, case.spec.eps) if case.spec.post_norm else out


def run(case: Case, inputs: dict[str, Tensor | None], by_kernels: bool, mean: bool = False) -> dict[str, Tensor]:
    """h, out (or its mean) and the gradients of all that has one, fused or by the reference in float64."""
    cast = (lambda t: t.detach().clone()) if by_kernels else (lambda t: t.detach().double())
    leaves = {k: cast(inputs[k]).requires_grad_() for k in ("x", "weight", "bias") if inputs[k] is not None}
    x, weight, bias = leaves["x"], leaves.get("weight"), leaves["bias"]
    sublayer = inputs["sublayer"].double()
    if by_kernels:
        h, state = fused.read_streams(x, weight, bias, case.spec)
        y = torch.tanh(h.double() @ sublayer).to(x.dtype)
        out = fused.write_streams(y, state, mean=mean)
    else:
        streams = x.expand(-1, case.spec.n, -1)
        h, state = reference_read(streams, weight, bias, case)
        y = torch.tanh(h @ sublayer)
        out = reference_write(streams, y, state, case)
        out = out.mean(1) if mean else out
    grad = inputs["grad"][:, 0] if mean else inputs["grad"]
    gradients = torch.autograd.grad(out, list(leaves.values()), cast(grad))
    return {"h": h, "out": out} | {f"grad {k}": g for k, g in zip(leaves, gradients)}


def assert_close(case: Case, inputs: dict[str, Tensor | None], scale: float = 1.0, mean: bool = False) -> None:
    computed, wanted = run(case, inputs, True, mean), run(case, inputs, False, mean)
    forward, gradient = TOLERANCE[inputs["x"].dtype]
    for name, value in computed.items():
        assert torch.isfinite(value).all(), name
        error = (value.double() - wanted[name]).norm() / wanted[name].norm().clamp(min=1e-30)
        allowed = (gradient if name.startswith("grad") else forward) * max(1.0, scale)
        if isinstance(case.mixer, mixers.Grassmann) and inputs["x"].dtype != torch.float32:
            allowed *= 5  # a nearly singular frame multiplies the rounding of the weight
        assert error <= allowed, f"{name}: {error:.1e}"


def copy_row(inputs: list[dict[str, Tensor | None]], form: str) -> list[Tensor]:
    """Return leaves for `run_row`: the first streams, and the weight and the bias of each connection."""
    tensors = [inputs[0]["x"], *(given[name] for given in inputs for name in ("weight", "bias"))]
    return [(t.double() if form == "reference" else t.clone()).requires_grad_() for t in tensors]


def run_row(cases: list[Case], leaves: list[Tensor], form: str, delayed: bool = False) -> list[Tensor]:
    """Run connections in a row around tanh; return each sublayer's input and the streams after each connection.

    The form "fused" joins each write with the next read, "separate" does not, and "reference" is the truth. Delayed
    reads have the weights of the connection before; the last sum of streams is then added to the last streams.
    """
    streams, *parameters = leaves
    pairs, results = list(zip(parameters[::2], parameters[1::2])), []
    streams = streams.expand(-1, cases[0].spec.n, -1) if form == "reference" else streams
    first = ready = streams[:, 0]
    for k, (case, own) in enumerate(zip(cases, pairs)):
        if form == "reference":
            h, state = reference_read(streams, *own, case)
            h = ready if delayed else h
            streams = reference_write(streams, torch.tanh(h), state, case)
            ready = reference.gather(streams, state[0])
            results += [h, streams]
            continue
        if k == 0 or form == "separate":
            h, state = fused.read_streams(streams, *own, case.spec)
            h = first if delayed else h
        results.append(h)
        if k + 1 == len(cases) or form == "separate":
            streams = fused.write_streams(torch.tanh(h), state)
        else:
            following = *pairs[k + 1], cases[k + 1].spec
            streams, h, state = fused.write_read_streams(torch.tanh(h), state, *following, delayed)
        results.append(streams)
    if delayed:
        last = ready if form == "reference" else state.gather(streams)
        results.append(streams + last.unsqueeze(1))
    return results
