"""One stream to n and back."""

import pytest
import torch

import jpmhc


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
    with pytest.raises(ValueError, match="streams must be a whole number and at least 1"):
        jpmhc.expand_streams(torch.zeros(3), 0)
    with pytest.raises(ValueError, match="n, d"):
        jpmhc.reduce_streams(torch.zeros(3))
