"""What a connection knows of its sublayer: extra arguments reach it, and a residual of its own is noticed."""

import warnings

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

import jpmhc

DIM, N = 8, 4


class Scaled(nn.Module):
    """Stands for attention: it has an argument that the layer beside it has not."""

    def forward(self, h, scale=None, *, shift=0.0):
        return h * (1.0 if scale is None else scale) + shift


def make_stack(*sublayers, **options):
    return jpmhc.HyperConnectionStack(
        [jpmhc.HyperConnection(one, DIM, N, index=k) for k, one in enumerate(sublayers)], **options
    )


@pytest.mark.parametrize("delayed", [False, True])
def test_a_keyword_reaches_only_the_sublayers_that_take_it(delayed):
    seen = []
    stack = make_stack(
        Scaled(),
        nn.Linear(DIM, DIM),
        lambda h, **rest: seen.append(rest) or h,
        reduce=True,
        expand=True,
        delayed=delayed,
    )
    nn.init.zeros_(stack[1].sublayer.weight)
    nn.init.zeros_(stack[1].sublayer.bias)
    x = torch.randn(2, 3, DIM)
    found = stack(x, scale=2.0, shift=1.0)
    assert torch.allclose(found, 2 * (3 * x + 1), atol=1e-5)  # (x + 2x + 1) + 0, doubled by the last
    assert seen == [{"scale": 2.0, "shift": 1.0}]


def test_a_connection_that_is_wrapped_gets_its_keyword():
    stack = make_stack(Scaled(), nn.Linear(DIM, DIM))
    x = torch.randn(2, N, DIM, requires_grad=True)
    expected = stack(x, scale=2.0)
    wrapped = jpmhc.HyperConnectionStack([checkpoint_wrapper(block) for block in stack])
    assert torch.allclose(wrapped(x, scale=2.0), expected)


@pytest.mark.parametrize(
    ("args", "kwargs", "message"),
    [
        ((), {"maks": 1}, "no sublayer of this stack takes 'maks'; their arguments are h, input, scale, shift"),
        ((2.0,), {}, r"sublayer 1 \(Linear\) takes 0 extra arguments without a name, got 1: pass them by name"),
    ],
)
def test_arguments_that_find_no_taker_are_refused(args, kwargs, message):
    with pytest.raises(ValueError, match=message):
        make_stack(Scaled(), nn.Linear(DIM, DIM))(torch.randn(2, N, DIM), *args, **kwargs)


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
