"""One stream to n and back."""

import warnings

import pytest
import torch
from torch import nn

import jpmhc


def make_blocks():
    return [jpmhc.HyperConnection(nn.Linear(8, 8), 8, streams=4, index=k) for k in range(2)]


@pytest.mark.parametrize("make", [make_blocks, lambda: [jpmhc.HyperConnectionStack(make_blocks())]])
def test_tokens_in_place_of_streams_are_noticed_once(make):
    """Four tokens of a hidden state have the shape of four streams; expanded streams are equal at first."""
    first, *_ = make()
    tokens = torch.randn(2, 4, 8)
    with pytest.warns(UserWarning, match=r"the first streams \[2, 4, 8\] differ .* expand_streams"):
        first(tokens)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        first(tokens)
        blocks = make()
        for block in blocks:  # what the first returns are streams that differ
            tokens = block(jpmhc.expand_streams(tokens[:, 0], 4) if block is blocks[0] else tokens)


def test_equal_streams_that_were_mixed_are_no_tokens():
    """A stack after a fresh one sees streams that differ by rounding; a NaN is not taken for a difference."""
    blocks = [jpmhc.HyperConnection(nn.Linear(8, 8), 8, streams=4, mixer="sinkhorn", index=0) for _ in range(2)]
    x = jpmhc.expand_streams(torch.randn(5, 8), 4)
    x[0] = torch.nan
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        blocks[1](blocks[0](x))


def test_a_first_call_that_is_not_looked_at_leaves_the_next_one_to_be():
    stack, tokens = jpmhc.HyperConnectionStack(make_blocks()), torch.randn(3, 4, 8)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        torch.func.vmap(stack)(torch.randn(2, 3, 4, 8))
        torch.compile(stack, backend="eager")(tokens)
    with torch._dynamo.config.patch(error_on_recompile=True):
        with pytest.warns(UserWarning, match="the first streams"):
            stack(tokens)
        torch.compile(stack, backend="eager")(tokens)


def test_different_streams_may_be_meant():
    tokens = torch.randn(2, 4, 8)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        jpmhc.HyperConnectionStack(make_blocks(), expand=False)(tokens)
        jpmhc.HyperConnection(nn.Linear(8, 8), 8, streams=4, index=3)(tokens)
        jpmhc.HyperConnectionStack(make_blocks())(torch.randn(2, 3, 4, 8))  # a batch of sequences of streams


def test_reduce_undoes_expand():
    x = torch.randn(2, 3, 5, dtype=torch.float64)
    streams = jpmhc.expand_streams(x, 4)
    assert streams.shape == (2, 3, 4, 5)
    assert all(torch.equal(streams[..., k, :], x) for k in range(4))
    assert torch.allclose(jpmhc.reduce_streams(streams), x)


def test_streams_are_copies():
    streams = jpmhc.expand_streams(torch.zeros(3), 2)
    streams[0] = 1
    assert streams[1].abs().max() == 0


def test_bad_input_is_named():
    with pytest.raises(ValueError, match="streams must be a whole number, at least 1"):
        jpmhc.expand_streams(torch.zeros(3), 0)
    with pytest.raises(ValueError, match=r"a hidden state of shape \[..., d\], got str"):
        jpmhc.expand_streams("a", 4)
    with pytest.raises(ValueError, match="a list of HyperConnections, got one HyperConnection"):
        jpmhc.HyperConnectionStack(make_blocks()[0])
    with pytest.raises(ValueError, match="n, d"):
        jpmhc.reduce_streams(torch.zeros(3))
