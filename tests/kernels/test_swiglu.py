"""The gated layer's fused derivative, against autograd through the plain formula in float64."""

import pytest
import torch
import torch.nn.functional as F

from jpmhc.kernels import swiglu

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize(("tokens", "width", "out"), [(5, 24, 8), (9, 520, 3), (1, 8, 8), (0, 16, 4)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gated_linear(tokens, width, out, dtype):
    tolerance = 2e-2 if dtype == torch.bfloat16 else 2e-5
    generator = torch.Generator().manual_seed(0)
    gate_up, weight, upstream = (
        torch.randn(*shape, generator=generator).to(DEVICE, dtype)
        for shape in ((tokens, 2 * width), (out, width), (tokens, out))
    )
    leaves = [gate_up.requires_grad_(), weight.requires_grad_()]
    found = swiglu.gated_linear(*leaves)
    gradients = torch.autograd.grad(found, leaves, upstream)
    exact = [leaf.detach().double().requires_grad_() for leaf in leaves]
    gate, up = exact[0].chunk(2, -1)
    truth = F.linear(F.silu(gate) * up, exact[1])
    expected = torch.autograd.grad(truth, exact, upstream.double())
    for mine, theirs in zip((found, *gradients), (truth, *expected)):
        assert mine.dtype == dtype
        assert (mine.double() - theirs).norm() <= tolerance * theirs.norm()
