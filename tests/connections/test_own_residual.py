"""Sublayers that add their own input are noticed; sublayers that do not are left in peace."""

import warnings

import pytest
from torch import nn

import jpmhc

DIM = 8


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.mlp = nn.LayerNorm(DIM), nn.Linear(DIM, DIM)

    def forward(self, x):
        return x + self.mlp(self.norm(x))


class LaterBlock(Block):
    def forward(self, x, use=True):
        residual = x
        x = self.norm(x)
        if use:
            x = self.mlp(x)
        x = residual + x
        return x


class InPlaceBlock(Block):
    def forward(self, x):
        x += self.mlp(self.norm(x))
        return x


class ShortBlock(Block):
    def forward(s, x):
        x = x + s.norm(x); return x + s.mlp(x)  # noqa: E702  # fmt: skip


class Offset(Block):
    """Adds to its input what is not computed from it, and sums of its own."""

    def forward(self, x):
        x = x + self.norm.bias
        gate = self.mlp(x)
        value = self.norm(x)
        return value + gate * value


def make(sublayer):
    return jpmhc.HyperConnection(sublayer, DIM)


@pytest.mark.parametrize("block", [Block, LaterBlock, InPlaceBlock, ShortBlock, lambda: nn.Sequential(Block())])
def test_a_residual_of_its_own_is_named(block):
    with pytest.warns(UserWarning, match=r"\(with norm, mlp\) adds its own input, `.*`, and the connection"):
        make(block())


def test_pytorchs_own_block_is_noticed():
    with pytest.warns(UserWarning, match=r"TransformerEncoderLayer .*self_attn.* adds its own input"):
        make(nn.TransformerEncoderLayer(DIM, 2, batch_first=True))


@pytest.mark.parametrize(
    "sublayer",
    [Offset(), nn.Linear(DIM, DIM), nn.Sequential(nn.RMSNorm(DIM), nn.Linear(DIM, DIM)), lambda h: h, None],
)
def test_other_sublayers_pass(sublayer):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        make(sublayer)
