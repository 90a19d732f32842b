"""The ends of a model: copies and means at the start, learned factors and weights afterwards."""

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


def test_the_learned_head_starts_as_the_mean():
    x = torch.randn(3, 5, 4, 8)
    torch.testing.assert_close(jpmhc.StreamHead(8, 4)(x), x.mean(-2))
    torch.testing.assert_close(jpmhc.StreamHead(8, 4, "mean")(x), jpmhc.reduce_streams(x))
    torch.testing.assert_close(jpmhc.StreamHead(8, 4, "sum")(x), x.sum(-2))


def test_the_learned_head_follows_its_formula():
    torch.manual_seed(0)
    head = jpmhc.StreamHead(8, 4, eps=1e-3, read_eps=1e-2).double()
    for parameter in head.parameters():
        torch.nn.init.normal_(parameter)
    x = torch.randn(7, 4, 8, dtype=torch.float64)
    for token, found in zip(x, head(x)):
        normed = token.flatten() / (token.square().mean() + 1e-3).sqrt()
        weights = torch.sigmoid(head.scale * (head.weight @ normed) + head.bias) + 1e-2
        torch.testing.assert_close(found, sum(w * stream for w, stream in zip(weights, token)), rtol=1e-13, atol=1e-13)


def test_bad_input():
    with pytest.raises(ValueError, match="no kind of head is called 'max'; choose one of learned, mean, sum"):
        jpmhc.StreamHead(8, 4, "max")
    with pytest.raises(ValueError, match=r"expected streams of shape \[\.\.\., 4, 8\]"):
        jpmhc.StreamHead(8, 4)(torch.randn(2, 3, 8))


@pytest.mark.parametrize("kind", ["learned", "mean", "sum"])
def test_equal_streams_may_be_given_once(kind):
    head = jpmhc.StreamHead(8, 4, kind)
    for parameter in head.parameters():
        torch.nn.init.normal_(parameter)
    x = torch.randn(3, 1, 8)
    torch.testing.assert_close(head(x), head(x.repeat(1, 4, 1)))
