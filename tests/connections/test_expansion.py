"""StreamExpansion: copies at the start, a learned factor for every stream afterwards."""

import pytest
import torch

import jpmhc


def test_it_starts_as_copies():
    x = torch.randn(2, 3, 8)
    expansion = jpmhc.StreamExpansion(4)
    assert torch.equal(expansion(x), jpmhc.expand_streams(x, 4))
    assert torch.equal(expansion(x.bfloat16()), jpmhc.expand_streams(x.bfloat16(), 4))


def test_each_stream_has_its_own_factor_and_gradient():
    expansion = jpmhc.StreamExpansion(3, dtype=torch.float64)
    x = torch.randn(5, 2, dtype=torch.float64)
    with torch.no_grad():
        expansion.scale.copy_(torch.tensor([1.0, -2.0, 0.5]))
    out = expansion(x)
    for k, factor in enumerate((1.0, -2.0, 0.5)):
        assert torch.equal(out[:, k], factor * x)
    (gradient,) = torch.autograd.grad(out[:, 1].sum(), expansion.parameters())
    torch.testing.assert_close(gradient, torch.tensor([0.0, x.sum(), 0.0], dtype=torch.float64))


def test_weight_decay_leaves_the_factors_alone_and_half_types_stay_wide():
    expansion = jpmhc.StreamExpansion(2, dtype=torch.bfloat16)
    assert expansion.scale.dtype == torch.float32
    assert jpmhc.parameter_groups(expansion, 0.1)[1]["params"] == [expansion.scale]
    with pytest.raises(ValueError, match="streams must be a whole number"):
        jpmhc.StreamExpansion(0)
