r"""The arithmetic of one hyper-connection in plain PyTorch, with which the tests compare every faster form.

A connection turns the streams x [T, n, d] of T tokens into logits, the logits into coefficients (read weights r, write
weights w, skip matrix H), and then computes (eq. hc-general, cayley-fwd)

    h = Σ_j r_j x_j,    y = sublayer(h),    x_i ← Σ_j H_ij x_j + w_i y.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from jpmhc import dtensors, modes, precision
from jpmhc.connections.recompute import save_tensor
from jpmhc.connections.streams import flatten_streams

if TYPE_CHECKING:
    from jpmhc.connections.coefficients import Coefficients
    from jpmhc.connections.hyper import HyperConnection

EPS = 1e-6


def compute_logits(x: Tensor, weight: Tensor, norm: str, eps: float = EPS) -> Tensor:
    """Return the logits W norm(x) of each token, with W = `weight` (eq. fused-proj). [T, n, d], [K, n * d] → [T, K]

    The norm is over all n · d numbers of a token and has no weights. "rms" adds eps to the mean square, under the root;
    "rms_outside" adds eps to the root; "layer" subtracts the mean before "rms". A token whose mean square overflows
    gives NaN: in float32 its numbers must stay below about 1e18.
    """
    with precision.without_autocast(x):
        flat, weight = _widen(x.flatten(1), weight)
        if norm == "rms_outside":
            root = torch.linalg.vector_norm(flat, dim=-1, keepdim=True) * flat.shape[1] ** -0.5
            root = torch.where(root.square() < torch.inf, root, torch.nan)
            return F.linear(flat, weight) / (root + eps)
        flat = centre(flat) if norm == "layer" else flat
        return F.linear(_divide_by_rms(flat, eps), weight)


def centre(x: Tensor) -> Tensor:
    """Return x minus its mean over the last dimension. A second subtraction removes the first one's rounding error."""
    x = x - x.mean(-1, keepdim=True)
    return x - x.mean(-1, keepdim=True)


def gather(x: Tensor, read: Tensor) -> Tensor:
    """Return the sublayer's input Σ_j r_j x_j, with r = `read`. [T, n, d], [T, n] → [T, d]"""
    with precision.without_autocast(x):
        return _mix(read.unsqueeze(1), x).squeeze(1).to(x.dtype)


def scatter(x: Tensor, y: Tensor, write: Tensor, skip: Tensor) -> Tensor:
    """Return the new streams `skip` x + `write` ⊗ y. [T, n, d], [T, d], [T, n], [T, n, n] → [T, n, d]"""
    with precision.without_autocast(x):
        # eqs. hc-general, cayley-fwd
        return torch.addcmul(_mix(skip, x), write.unsqueeze(2), y.unsqueeze(1)).to(x.dtype)


def normalise_streams(x: Tensor, eps: float = EPS) -> Tensor:
    """Divide each stream by its root mean square, as the post-norm "rms" does. [..., n, d]"""
    return _divide_by_rms(x.to(torch.promote_types(x.dtype, torch.float32)), eps).to(x.dtype)


def _divide_by_rms(x: Tensor, eps: float) -> Tensor:
    """Divide x by its root mean square over the last dimension. If the mean square overflows, return NaN."""
    square = x.square().mean(-1, keepdim=True)
    return x * torch.add((square + eps).rsqrt(), square, alpha=0)  # 0 · ∞ is NaN


def normalise_layer(x: Tensor, weight: Tensor, bias: Tensor, eps: float = EPS) -> Tensor:
    """Apply a layer norm with weights to each stream, as the post-norm "layer" does (fig. jpmhc-block). [..., n, d]"""
    wide = torch.promote_types(x.dtype, weight.dtype)
    return F.layer_norm(x.to(wide), x.shape[-1:], weight.to(wide), bias.to(wide), eps).to(x.dtype)


def _mix(weights: Tensor, x: Tensor) -> Tensor:
    """Multiply each token's matrix of weights with the token's streams. [T, m, n], [T, n, d] → [T, m, d]"""
    weights, x = _widen(weights, x)
    if torch.compiler.is_compiling():  # a compiler unrolls a short sum, but calls a library for a product
        return (weights.unsqueeze(3) * x.unsqueeze(1)).sum(2)
    return torch.bmm(weights, x)


def _widen(one: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
    """Convert two tensors to the wider of their types."""
    if one.dtype == other.dtype:
        return one, other
    wide = torch.promote_types(one.dtype, other.dtype)
    return one.to(wide), other.to(wide)


class ReferenceState(NamedTuple):
    """The state that the reference's read returns."""

    x: Tensor
    coefficients: "Coefficients"

    def fits(self, block: "HyperConnection") -> bool:
        return (self.coefficients.read.shape[-1], self.x.shape[-1]) == (block.streams, block.dim)

    def gather(self, x: Tensor) -> Tensor:
        return gather(x.flatten(0, -3), self.coefficients.read).view(*x.shape[:-2], -1)

    def write(self, block: "HyperConnection", x: Tensor, y: Tensor, mean: bool) -> Tensor:
        _, write, skip = self.coefficients
        y = scale_output(block, y).reshape(-1, block.dim)
        out = scatter(flatten_streams(x, block.streams, block.dim), y, write, skip)
        return finish_write(block, x, out, mean)

    def join(self, block: "HyperConnection", x: Tensor, following: "HyperConnection", delayed: bool = False) -> None:
        return None

    def make_rewrite(
        self, block: "HyperConnection", y: Tensor, following: "HyperConnection | None"
    ) -> Callable[[Tensor], Tensor]:
        return repeat_scatter(block, y, self.coefficients, scatter)


def read(block: "HyperConnection", x: Tensor) -> tuple[Tensor, ReferenceState]:
    """Read the streams in plain PyTorch. Return the sublayer's input and the state."""
    flat = flatten_streams(x, block.streams, block.dim)
    coefficients, _ = block.map(flat)
    return gather(flat, coefficients.read).reshape(*x.shape[:-2], block.dim), ReferenceState(x, coefficients)


def scale_output(block: "HyperConnection", y: Tensor) -> Tensor:
    """Multiply a sublayer's output by the block's write scale (eq. cayley-fwd4)."""
    return y if block.write_scale == 1 else y * block.write_scale


def normalise(block: "HyperConnection", x: Tensor) -> Tensor:
    """Apply the block's post-norm to the streams, if it has one. [..., n, d]"""
    if block.layer_norm is not None:
        return normalise_layer(x, *_norm_parameters(block), block.map.eps)
    return x if block.post_norm is None else normalise_streams(x, block.map.eps)


def freeze_norm(block: "HyperConnection") -> Callable[[Tensor], Tensor]:
    """Return `normalise` as a function of x, with the present settings and without gradients for the norm's weights."""
    eps = block.map.eps
    if block.layer_norm is not None:
        weight, bias = map(save_tensor, _norm_parameters(block))
        return lambda x: normalise_layer(x, weight.find(), bias.find(), eps)
    return (lambda x: x) if block.post_norm is None else lambda x: normalise_streams(x, eps)


def _norm_parameters(block: "HyperConnection") -> tuple[Tensor, Tensor]:
    norm = block.layer_norm
    assert norm is not None
    return dtensors.leave(norm.weight, block.map.tokens_apart), dtensors.leave(norm.bias, block.map.tokens_apart)


def finish_write(block: "HyperConnection", x: Tensor, out: Tensor, mean: bool) -> Tensor:
    """Reshape the new streams [T, n, d] like x and apply the post-norm. Return the streams, or their mean."""
    shape = (*x.shape[:-2], block.streams, block.dim)
    # FSDP warns of a module that returns a view. No other code uses `out`, so that its new shape need not be a view.
    traced = torch.compiler.is_compiling() or modes.is_transformed()
    out = normalise(block, out.view(shape) if traced else torch.ops.aten._unsafe_view(out, shape))
    return out.mean(-2) if mean else out


def repeat_scatter(
    block: "HyperConnection", y: Tensor, coefficients: "Coefficients", step: Callable[..., Tensor]
) -> Callable[[Tensor], Tensor]:
    """Return a function of streams x that repeats the write of y to x; `step` is `scatter` of this file or eager.py."""
    output, write, skip = save_tensor(y), save_tensor(coefficients.write), save_tensor(coefficients.skip)
    scale, normalise, streams, dim = block.write_scale, freeze_norm(block), block.streams, block.dim

    def rewrite(x: Tensor) -> Tensor:
        y = output.find() if scale == 1 else output.find() * scale
        out = step(flatten_streams(x, streams, dim), y.reshape(-1, dim), write.find(), skip.find())
        return normalise(out.view(*x.shape[:-2], streams, dim))

    return rewrite
