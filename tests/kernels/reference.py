"""The connection written plainly in float64, from the definitions: what the kernels are compared with."""

import math

import torch
from torch import Tensor

from jpmhc.kernels import Spec


class Sinkhorn(torch.autograd.Function):
    """Alternate normalisation; the gradient holds the row and column sums fixed, by a pseudo-inverse of that system."""

    @staticmethod
    def forward(ctx, logits: Tensor, iterations: int) -> Tensor:
        p = logits.clamp(-10, 10)
        for _ in range(iterations):
            p = p - p.logsumexp(-1, keepdim=True)
            p = p - p.logsumexp(-2, keepdim=True)
        p = p.exp()
        ctx.save_for_backward(logits, p)
        return p

    @staticmethod
    def backward(ctx, grad: Tensor):
        logits, p = ctx.saved_tensors
        rows, columns = torch.diag_embed(p.sum(-1)), torch.diag_embed(p.sum(-2))
        system = torch.cat([torch.cat([rows, p], -1), torch.cat([p.mT, columns], -1)], -2)
        right = torch.cat([(p * grad).sum(-1), (p * grad).sum(-2)], -1)
        u, v = (torch.linalg.pinv(system, rtol=1e-13) @ right.unsqueeze(-1)).squeeze(-1).chunk(2, -1)
        return torch.where(logits.abs() <= 10, p * (grad - u.unsqueeze(-1) - v.unsqueeze(-2)), 0), None


def mixer(logits: Tensor, spec: Spec) -> Tensor:
    """H of every token. logits: [T, mixer logits] → [T, n, n]"""
    n = spec.n
    eye = torch.eye(n, dtype=logits.dtype, device=logits.device)
    if spec.mixer == "identity":
        return eye.expand(len(logits), n, n)
    if spec.mixer == "unconstrained":
        return logits.view(-1, n, n)
    if spec.mixer == "sinkhorn":
        return Sinkhorn.apply(logits.view(-1, n, n), spec.iterations)
    if spec.mixer == "cayley":
        i, j = torch.triu_indices(n, n, 1)
        upper = logits.new_zeros(len(logits), n, n).index_put((torch.arange(len(logits)).unsqueeze(1), i, j), logits)
        a = spec.scale * (upper - upper.mT)
        if spec.iterations is None:
            return torch.linalg.solve(eye - a / 2, eye + a / 2)
        y = eye + a
        for _ in range(spec.iterations):
            y = eye + a / 2 @ (eye + y)
        return y
    if spec.mixer == "grassmann":
        frame = logits.view(-1, n, spec.rank)
        return frame @ torch.linalg.solve(frame.mT @ frame, frame.mT)
    if spec.mixer == "permutation":
        basis = torch.stack([eye[:, list(p)] for p in spec.permutations])  # column j is e_σ(j)
        return torch.einsum("tk,kij->tij", logits.softmax(-1), basis)
    h = logits.new_ones(len(logits), 1, 1)
    for f in range(int(math.log2(n))):
        a = logits[:, f].sigmoid()
        factor = torch.stack([torch.stack([a, 1 - a], -1), torch.stack([1 - a, a], -1)], -2)
        h = torch.einsum("tij,tkl->tikjl", h, factor).reshape(len(h), 2 * h.shape[1], -1)
    return h


def coefficients(x: Tensor, weight: Tensor | None, bias: Tensor, spec: Spec) -> tuple[Tensor, Tensor, Tensor]:
    """x: [T, n, d] → r [T, n], w [T, n], H [T, n, n]"""
    n = spec.n
    flat = x.reshape(len(x), -1)
    centred = flat - flat.mean(-1, keepdim=True) if spec.norm == "layer" else flat
    normed = centred / (centred.square().mean(-1, keepdim=True) + spec.eps).sqrt()
    logits = bias.expand(len(x), -1) if weight is None else normed @ weight.mT + bias
    read, write, mix = logits.split([spec.read_logits, spec.write_logits, spec.mixer_logits], -1)
    read, write = read / spec.temperature, write / spec.temperature
    r = {
        "softmax_matrix": lambda: read.view(-1, n, n).softmax(-1).mean(-2),
        "softmax": lambda: read.softmax(-1),
        "sigmoid": lambda: read.sigmoid(),
    }[spec.read]()
    w = {
        "softmax_matrix": lambda: write.view(-1, n, n).softmax(-2).sum(-1),
        "softmax": lambda: n * write.softmax(-1),
        "sigmoid": lambda: 2 * write.sigmoid(),
    }[spec.write]()
    return r, w, mixer(mix, spec)


def read(x: Tensor, weight: Tensor | None, bias: Tensor, spec: Spec) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    r, w, h = coefficients(x, weight, bias, spec)
    return torch.einsum("tj,tjd->td", r, x), (w, h)


def write(x: Tensor, y: Tensor, state: tuple[Tensor, Tensor], spec: Spec) -> Tensor:
    w, h = state
    out = torch.einsum("tij,tjd->tid", h, x) + w.unsqueeze(-1) * y.unsqueeze(-2)
    return out / (out.square().mean(-1, keepdim=True) + spec.eps).sqrt() if spec.post_norm else out
