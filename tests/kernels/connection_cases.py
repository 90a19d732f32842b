"""Connections to try the kernels on, the truth about them, and how far from it they may be."""

import torch
from torch import Tensor

from jpmhc import kernels
from jpmhc.kernels import Spec
from tests.kernels import reference

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# ‖out - reference‖ / ‖reference‖ for the results and for the gradients. Half types: the rounding of the streams and of
# the weight that the tensor cores multiply by; the logits' scale multiplies the second.
TOLERANCE = {torch.float32: (2e-6, 2e-5), torch.float16: (2e-3, 4e-3), torch.bfloat16: (8e-3, 2e-2)}
PERMUTATIONS = ((0, 1, 2, 3), (1, 0, 3, 2), (2, 3, 0, 1), (3, 2, 1, 0), (1, 2, 3, 0), (0, 2, 1, 3))
MIXERS = {
    "identity": {},
    "unconstrained": {},
    "sinkhorn": {"iterations": 20},
    "cayley": {},
    "cayley-2": {"iterations": 2},
    "grassmann-2": {"rank": 2},
    "grassmann-3": {"rank": 3},
    "permutation": {"permutations": PERMUTATIONS},
    "kronecker": {},
}


def spec_of(name: str, n: int = 4, d: int = 24, **settings) -> Spec:
    return Spec(n, d, mixer=name.split("-")[0], **{**MIXERS[name], **settings})


def draw(
    spec: Spec, tokens: int, dtype: torch.dtype, scale: float, dynamic: bool, seed: int = 0, held: int | None = None
) -> dict[str, Tensor | None]:
    """`held`: how many streams x holds; one stands for n equal ones."""
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


def run(spec: Spec, inputs: dict[str, Tensor | None], fused: bool, mean: bool = False) -> dict[str, Tensor]:
    """h, out (or its mean) and the gradients of all that has one, fused or by the reference in float64."""
    cast = (lambda t: t.detach().clone()) if fused else (lambda t: t.detach().double())
    leaves = {k: cast(inputs[k]).requires_grad_() for k in ("x", "weight", "bias") if inputs[k] is not None}
    x, weight, bias = leaves["x"], leaves.get("weight"), leaves["bias"]
    sublayer = inputs["sublayer"].double()
    if fused:
        h, state = kernels.read(x, weight, bias, spec)
        y = torch.tanh(h.double() @ sublayer).to(x.dtype)
        out = kernels.write(y, state, mean=mean)
    else:
        streams = x.expand(-1, spec.n, -1)
        h, state = reference.read(streams, weight, bias, spec)
        y = torch.tanh(h @ sublayer)
        out = reference.write(streams, y, state, spec)
        out = out.mean(1) if mean else out
    grad = inputs["grad"][:, 0] if mean else inputs["grad"]
    gradients = torch.autograd.grad(out, list(leaves.values()), cast(grad))
    return {"h": h, "out": out} | {f"grad {k}": g for k, g in zip(leaves, gradients)}


def assert_close(spec: Spec, inputs: dict[str, Tensor | None], scale: float = 1.0, mean: bool = False) -> None:
    fused, wanted = run(spec, inputs, True, mean), run(spec, inputs, False, mean)
    forward, gradient = TOLERANCE[inputs["x"].dtype]
    for name, value in fused.items():
        assert torch.isfinite(value).all(), name
        error = (value.double() - wanted[name]).norm() / wanted[name].norm().clamp(min=1e-30)
        allowed = (gradient if name.startswith("grad") else forward) * max(1.0, scale)
        if spec.mixer == "grassmann" and inputs["x"].dtype != torch.float32:
            allowed *= 5  # a nearly singular frame multiplies the rounding of the weight
        assert error <= allowed, f"{name}: {error:.1e}"
