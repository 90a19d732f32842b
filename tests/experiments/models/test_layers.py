"""Layers against their definitions."""

import numpy as np
import pytest
import torch

from jpmhc.experiments.models.layers import Attention, Linear, PuzzleTable, Rotary, SwiGLU, rms_norm, truncated_normal_


def test_rotary_inner_products_depend_on_the_distance_alone():
    """⟨R_s q, R_t k⟩ is the same for every pair of positions at the same distance, and rotation keeps norms."""
    rotary = Rotary(8, 12)
    q, k = torch.randn(2, 8, generator=torch.Generator().manual_seed(0)).double()
    rotated_q = rotary(q.float().expand(1, 12, 1, 8))[0, :, 0]
    rotated_k = rotary(k.float().expand(1, 12, 1, 8))[0, :, 0]
    gram = (rotated_q @ rotated_k.T).numpy()
    for distance in range(-11, 12):
        diagonal = np.diagonal(gram, distance)
        np.testing.assert_allclose(diagonal, diagonal[0], atol=2e-6)
    assert abs(gram[0, 5] - gram[0, 0]) > 1e-2
    # Pair (i, i + 4) turns by position · 10000^(−2i/8).
    angle = 3 * 10000 ** (-2 * 1 / 8)
    expected = q[1] * np.cos(angle) - q[5] * np.sin(angle)
    assert rotated_q[3, 1].item() == pytest.approx(expected.item(), abs=1e-6)


def test_attention_equals_the_written_out_form():
    torch.manual_seed(0)
    rotary = Rotary(4, 6)
    attention = Attention(8, 2, rotary)
    x = torch.randn(3, 6, 8)
    qkv = (x @ attention.qkv.weight.T).reshape(3, 6, 3, 2, 4)
    q, k, v = rotary(qkv[:, :, 0]), rotary(qkv[:, :, 1]), qkv[:, :, 2]
    scores = torch.einsum("bshd,bthd->bhst", q, k) / 2
    y = torch.einsum("bhst,bthd->bshd", scores.softmax(-1), v).reshape(3, 6, 8)
    torch.testing.assert_close(attention(x), y @ attention.out.weight.T, rtol=1e-4, atol=1e-5)


def test_swiglu_width_and_formula():
    torch.manual_seed(0)
    assert SwiGLU(512).down.weight.shape == (512, 1536)
    layer = SwiGLU(12, expansion=4, multiple=16)
    assert layer.down.weight.shape == (12, 32)
    x = torch.randn(5, 12)
    gate, up = x @ layer.gate_up.weight[:32].T, x @ layer.gate_up.weight[32:].T
    torch.testing.assert_close(layer(x), (gate * torch.sigmoid(gate) * up) @ layer.down.weight.T)


def test_rms_norm_is_computed_in_float32():
    x = torch.randn(4, 64, generator=torch.Generator().manual_seed(0)) * 300
    expected = x.double() / (x.double().square().mean(-1, keepdim=True) + 1e-5).sqrt()
    torch.testing.assert_close(rms_norm(x).double(), expected, rtol=1e-6, atol=1e-6)
    low = rms_norm(x.bfloat16())
    assert low.dtype == torch.bfloat16
    torch.testing.assert_close(low.double(), expected, rtol=1e-2, atol=1e-2)


def test_truncated_normal_has_the_standard_deviation_asked_for():
    torch.manual_seed(0)
    sample = truncated_normal_(torch.empty(200_000), 0.3)
    assert sample.std().item() == pytest.approx(0.3, rel=5e-3)
    assert sample.abs().max() <= 2 * 0.3 / 0.8796 + 1e-6


def test_linear_computes_in_the_type_of_its_input_and_keeps_float32_gradients():
    layer = Linear(8, 4, bias=True)
    y = layer(torch.randn(3, 8, dtype=torch.bfloat16))
    assert y.dtype == torch.bfloat16
    y.sum().backward()
    assert layer.weight.grad is not None
    assert layer.weight.grad.dtype == torch.float32


def test_puzzle_table_starts_at_zero_with_a_sparse_gradient():
    table = PuzzleTable(1000, 4)
    rows = table(torch.tensor([5, 5, 9]))
    assert torch.equal(rows, torch.zeros(3, 4))
    rows.sum().backward()
    assert table.weight.grad is not None
    assert table.weight.grad.is_sparse
    assert table.weight.grad._values().shape == (3, 4)
