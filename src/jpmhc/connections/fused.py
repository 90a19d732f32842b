"""The form of a connection that runs on the Triton kernels: when it applies, and its steps.

Each step calls one of the passes in `jpmhc.kernels`. Each function imports the pass that it calls, because Triton is
not available on every platform.
"""

import importlib.util
import os
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from jpmhc import modes
from jpmhc.connections import reference
from jpmhc.connections.recompute import save_tensor
from jpmhc.kernels.spec import Spec, make_spec
from jpmhc.mixers import Mixer, TritonForm

if TYPE_CHECKING:
    from jpmhc.connections.hyper import HyperConnection


class FusedState(NamedTuple):
    """The state that the fused form's read returns."""

    x: Tensor
    link: Tensor | None  # carries the streams' gradient from the write to the read, without memory. [..., n, d]
    coefficients: Tensor  # n read weights, n write weights and H by rows, per token or once. [T or 1, n(n+2)]
    spec: Spec

    def fits(self, block: "HyperConnection") -> bool:
        return (self.spec.n, self.spec.d) == (block.streams, block.dim)

    def gather(self, x: Tensor) -> Tensor:
        streams = x.flatten(0, -3)
        read = self.coefficients[:, : self.spec.n].expand(len(streams), -1)
        return reference.gather(streams, read).view(*x.shape[:-2], -1)

    def write(self, block: "HyperConnection", x: Tensor, y: Tensor, mean: bool) -> Tensor:
        y = reference.scale_output(block, y).to(x.dtype)
        if block.layer_norm is None:
            return write_streams(y, self, x, mean)
        out = reference.normalise(block, write_streams(y, self, x))
        return out.mean(-2) if mean else out

    def join(
        self, block: "HyperConnection", x: Tensor, following: "HyperConnection", delayed: bool = False
    ) -> "Callable[[Tensor], tuple[Tensor, Tensor, FusedState]] | None":
        if x is not self.x or block.layer_norm is not None or following.form is not None:
            return None
        same_shape = (following.streams, following.dim) == (block.streams, block.dim)
        spec = following.find_spec(x) if same_shape else None
        if spec is None:
            return None

        def write_read(y: Tensor) -> tuple[Tensor, Tensor, FusedState]:
            y = reference.scale_output(block, y).to(x.dtype)
            return write_read_streams(y, self, *following.map.parameters_for_kernels(), spec, delayed)

        return write_read

    def make_rewrite(
        self, block: "HyperConnection", y: Tensor, following: "HyperConnection | None"
    ) -> Callable[[Tensor], Tensor]:
        output, coefficients, spec = save_tensor(y), save_tensor(self.coefficients), self.spec
        scale, normalise = block.write_scale, reference.freeze_norm(block)

        def rewrite(x: Tensor) -> Tensor:
            y = (output.find() if scale == 1 else output.find() * scale).to(x.dtype)
            state = FusedState(x, None, coefficients.find(), spec)
            if not spec.post_norm:
                return normalise(write_streams(y, state))
            if following is None:
                return write_streams(y, state)
            # The kernel that wrote first, because another kernel would add up the squares in another order.
            next_spec = following.find_spec(x)
            assert next_spec is not None  # the write was fused with this read
            return write_read_streams(y, state, *following.map.parameters_for_kernels(), next_spec)[0].detach()

        return rewrite


def read(block: "HyperConnection", x: Tensor) -> tuple[Tensor, FusedState] | None:
    """Read the streams x by the kernels, and return h and the state; None if the kernels are not used."""
    spec = block.find_spec(x)
    return None if spec is None else read_streams(x, *block.map.parameters_for_kernels(), spec)


def read_streams(x: Tensor, weight: Tensor | None, bias: Tensor, spec: Spec) -> tuple[Tensor, FusedState]:
    r"""Return the sublayer's input $h = \sum_j r_j x_j$ and the state. The logits are $W\,\mathrm{norm}(x) + b$.

    Args:
        x: The streams, in float32, bfloat16 or float16. [..., n or 1, d]
        weight: W in float32, to be multiplied by `spec.scale`; if None, the logits are the bias. [K, n·d]
        bias: b in float32. [K]
        spec: The kernels' record of the connection; `spec.logits` is K.
    """
    from jpmhc.kernels.read import read

    h, link, coefficients, _ = read(None, x, weight, bias, spec, torch.is_grad_enabled())
    return h, FusedState(x, link, coefficients, spec)


def write_streams(y: Tensor, state: FusedState, x: Tensor | None = None, mean: bool = False) -> Tensor:
    r"""Compute the new streams $H x + w \otimes y$, or their mean, normalised if there is a post-norm.

    Args:
        y: The sublayer's output. [..., d]
        x: The streams to write to; None for the streams of the read. [..., n or 1, d]
        mean: Return the mean of the new streams, and do not store the streams. [..., d]
    """
    from jpmhc.kernels.write import write

    streams, link = (state.x, state.link) if x is None or x is state.x else (x, None)
    return write(link, streams, y, state.coefficients, state.spec, mean)


def write_read_streams(
    y: Tensor, state: FusedState, weight: Tensor | None, bias: Tensor, spec: Spec, delayed: bool = False
) -> tuple[Tensor, Tensor, FusedState]:
    """Write y, then read for the next connection. Return the new streams, the next sublayer's input and the next state.

    One kernel does both, unless two kernels are faster.

    Args:
        y: The sublayer's output. [..., d]
        state: The state from the read of the connection that writes.
        weight, bias, spec: The parameters and the record of the connection that reads.
        delayed: Read with the read weights of the connection that writes.
    """
    from jpmhc.kernels.write_read import one_kernel_decodes, one_kernel_pays, write_read

    x, link, coefficients, old = state
    tokens = y.numel() // old.d
    one = one_kernel_decodes(tokens, old) or one_kernel_pays(old, spec)
    if weight is None or not one or (delayed and (old.post_norm or len(coefficients) != tokens)):
        out = write_streams(y, state)
        h, following = read_streams(out, weight, bias, spec)
        return out, state.gather(out) if delayed else h, following
    keeps = torch.is_grad_enabled()
    h, link, out, coefficients, _ = write_read(link, x, y, coefficients, weight, bias, old, spec, delayed, keeps)
    return out, h, FusedState(out, link, coefficients, spec)


def describe(block: "HyperConnection") -> Spec | str:
    """Return the connection's settings as a `Spec`, or one sentence that says why the kernels cannot run it."""
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed"
    coefficients = block.map
    form = _find_triton_form(coefficients.mixer)
    if isinstance(form, str):
        return form
    return make_spec(
        form,
        coefficients.dim,
        coefficients.norm,
        coefficients.eps,
        coefficients.read,
        coefficients.write,
        coefficients.temperature,
        block.post_norm == "rms",
        coefficients.scale,
        coefficients.read_eps,
        coefficients.write_peak,
        coefficients.write_eps,
    )


def _find_triton_form(mixer: Mixer) -> TritonForm | str:
    """Return the mixer's Triton form, or one sentence that says why there is none.

    There is none if the mixer's class overrides `forward` without `triton_form`.
    """
    kind = type(mixer)
    described = next(base for base in kind.__mro__ if "triton_form" in vars(base))
    if kind.forward is not getattr(described, "forward", None):
        return f"the mixer {kind.__name__} has a forward of its own, which the kernels do not know"
    return mixer.triton_form()


def are_wanted(kernels: str, device: str) -> bool:
    """Return whether the setting `kernels` asks for the fused kernels on this type of device."""
    return kernels == "fused" or (kernels == "auto" and device == "cuda")


_CHOSEN: dict[tuple[object, ...], Spec] = {}  # keys: a connection's settings as text, its types and devices


def prepare_compiler() -> None:
    """Register the kernels' operators, and declare them to Inductor, if a compiler traces the running code."""
    if torch._guards.CompileContext.try_get() is not None:
        from jpmhc.kernels import write, write_read  # noqa: F401  (the imports register operators)
        from jpmhc.kernels.passes import declare_to_inductor

        declare_to_inductor()


def choose_spec(block: "HyperConnection", device: str, dtype: torch.dtype) -> Spec | None:
    """Return the connection's settings as a `Spec`, if the kernels can run the connection.

    Otherwise warn and return None, or raise an error if the connection has `kernels="fused"`.
    """
    coefficients, runs = block.map, device == "cuda" or _is_interpreted()
    bias = coefficients.bias
    texts = block.settings_text, coefficients.settings_text, coefficients.mixer.settings_text
    case = (texts, device, runs, dtype, bias.dtype, bias.device)
    known = _CHOSEN.get(case)
    if known is not None and not modes.is_transformed():
        return known
    spec = describe(block)
    reason = spec if isinstance(spec, str) else _find_obstacle(block, spec, device, dtype)
    if reason is None:
        assert isinstance(spec, Spec)
        _CHOSEN[case] = spec
        return spec
    if block.kernels == "fused":
        raise ValueError(f'kernels="fused" is not possible: {reason}')
    warnings.warn(f"hyper-connection runs on the PyTorch reference: {reason}", stacklevel=3)
    return None


def _find_obstacle(block: "HyperConnection", spec: Spec, device: str, dtype: torch.dtype) -> str | None:
    """Return one sentence that says why the kernels cannot run a connection with this record; None if they can."""
    bias = block.map.bias
    if device != "cuda" and not _is_interpreted():
        return f"the kernels need a CUDA device, the streams are on {device}"
    if bias.device.type != device:
        return f"the connection is on {bias.device.type} and its streams are on {device}"
    if modes.is_transformed():
        return "the kernels have no rules for torch.func transforms, forward-mode derivatives and torch.jit.trace"
    if bias.dtype == torch.float64:
        return f"the coefficients must be float32, they are {bias.dtype}"
    from jpmhc.kernels.read import why_not

    return why_not(spec, dtype, block.map.weight is not None)


def _is_interpreted() -> bool:
    return os.environ.get("TRITON_INTERPRET") == "1"
