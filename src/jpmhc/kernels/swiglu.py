r"""The second half of a gated feed-forward layer, $(\mathrm{silu}(g) \odot u)\, W^\top$, which saves only g, u and W.

g and u are the two outputs of the first half, and W is the weight. Autograd would also store the hidden product silu(g)
⊙ u for W's gradient, a third of the layer's activations, and a compiler would write the gradient of the concatenated
(g, u) at half the speed of memory. Here the backward pass goes once over g, u and the hidden gradient, and computes
both the gradient of (g, u) and the hidden product.
"""

from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from jpmhc.kernels.launch import kernel

ROWS, COLUMNS = 4, 512


@kernel
def _backward(gate_up, grad, grad_gate_up, hidden, T, WIDTH, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    rows = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    c = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    mask = (rows < T) & (c < WIDTH)
    gate_at = rows * (2 * WIDTH) + c
    up_at = gate_at + WIDTH
    at = rows * WIDTH + c
    g = tl.load(gate_up + gate_at, mask=mask, other=0.0).to(tl.float32)
    u = tl.load(gate_up + up_at, mask=mask, other=0.0).to(tl.float32)
    dh = tl.load(grad + at, mask=mask, other=0.0).to(tl.float32)
    s = 1 / (1 + tl.exp(-g))
    silu = g * s
    tl.store(grad_gate_up + gate_at, (dh * u * (s + silu * (1 - s))).to(grad_gate_up.dtype.element_ty), mask=mask)
    tl.store(grad_gate_up + up_at, (dh * silu).to(grad_gate_up.dtype.element_ty), mask=mask)
    tl.store(hidden + at, (silu * u).to(hidden.dtype.element_ty), mask=mask)


@torch.library.custom_op("jpmhc::swiglu_backward", mutates_args=())
def swiglu_backward(gate_up: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    """Compute the gradient of (g, u) [T, 2F] and the hidden product [T, F] from (g, u) and the hidden gradient."""
    gate_up, grad = gate_up.contiguous(), grad.contiguous()
    grad_gate_up, hidden = torch.empty_like(gate_up), torch.empty_like(grad)
    tokens, width = grad.shape
    if grad.numel():
        grid = (triton.cdiv(tokens, ROWS), triton.cdiv(width, COLUMNS))
        _backward[grid](gate_up, grad, grad_gate_up, hidden, tokens, width, ROWS=ROWS, COLUMNS=COLUMNS)
    return grad_gate_up, hidden


@swiglu_backward.register_fake
def _(gate_up: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    return gate_up.new_empty(gate_up.shape), grad.new_empty(grad.shape)


class _GatedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_up: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(gate_up, weight)
        gate, up = gate_up.chunk(2, dim=-1)
        return F.linear(F.silu(gate) * up, weight)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        gate_up, weight = ctx.saved_tensors
        grad = gradients[0]
        grad_gate_up, hidden = swiglu_backward(gate_up, grad @ weight)
        return grad_gate_up, grad.mT @ hidden


def gated_linear(gate_up: Tensor, weight: Tensor) -> Tensor:
    """Multiply silu(g) ⊙ u by the transposed weight; `gate_up` is (g, u). [..., 2F], [D, F] → [..., D]"""
    flat = gate_up.reshape(-1, gate_up.shape[-1])
    out: Tensor = _GatedLinear.apply(flat, weight)
    return out.reshape(*gate_up.shape[:-1], weight.shape[0])
