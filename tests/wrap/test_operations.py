"""Operations on each stream alike: what they do to streams is what they do to every single one."""

import pytest
import torch
from torch.nn import functional as F

from jpmhc.wrap.operations import FUNCTIONS, METHODS, OPERATIONS, TYPE_CHANGES

X = torch.randn(2, 3, 5, 4, 6, generator=torch.Generator().manual_seed(0))  # 4 streams of 6
MASK = torch.rand(2, 3, generator=torch.Generator().manual_seed(1)) > 0.4
TENSORS = [torch.randn(6), torch.randn(5, 1), torch.randn(2, 3, 5, 6), torch.tensor(2.0)]
SCALES = [(2.0,), *((tensor,) for tensor in TENSORS)]

# By name: arguments with which the streams stay, and arguments that mix the last dimension with others.
CASES = {
    "clone": ([()], []),
    "div": (SCALES, [(torch.randn(7, 2, 3, 5, 6),)]),
    "dropout": ([(0.5, False)], []),
    "flatten": ([(0, 1), (1, -2), (-3, -2)], [(0, -1), (2, 3), ()]),
    "getitem": (
        [(0,), (slice(1),), ((slice(None), 1),), (MASK,), ((None, 0),), (torch.tensor([1, 0]),)],
        [((..., 0),), ((0, 0, 0, 0),), ((slice(None),) * 4,)],
    ),
    "layer_norm": ([((6,), torch.randn(6))], [((5, 6),)]),
    "mul": (SCALES, [(torch.randn(7, 2, 3, 5, 6),)]),
    "permute": ([(1, 0, 2, 3), ((2, 0, 1, -1),)], [(0, 1, 3, 2)]),
    "reshape": (
        [(6, 5, 6), ((30, 6),), (torch.Size([2, -1, 6]),), (2, 15, -1)],
        [(2, 3, 5, 2, 3), (180,), (2, 3, -1), (-1,)],
    ),
    "rms_norm": ([((6,), torch.randn(6))], [((5, 6),)]),
    "roll": ([(1, 0), (2, -2), ((1, 1), (0, 1))], [(1, 3), (1, -1), (1,)]),
    "shift": ([(2.0,), (torch.randn(6),)], []),
    "squeeze": ([(0,), (-2,)], [(-1,), ()]),
    "transpose": ([(0, 1), (-2, 0)], [(0, 3), (-1, -2)]),
    "unsqueeze": ([(0,), (3,), (-2,)], [(4,), (-1,)]),
}
PLAIN = {"layer_norm": F.layer_norm, "rms_norm": F.rms_norm, "dropout": F.dropout}
PLAIN |= {"getitem": torch.Tensor.__getitem__, "shift": torch.Tensor.add}


def plain(name, x, args):
    return PLAIN.get(name, getattr(torch.Tensor, name, None))(x, *args)


@pytest.mark.parametrize("name", OPERATIONS)
def test_each_stream_is_treated_alike(name):
    for args in CASES[name][0]:
        found = OPERATIONS[name](X, *args)
        assert found is not None, args
        expected = torch.stack([plain(name, X[..., k, :], args) for k in range(4)], -2)
        assert torch.equal(found, expected) or torch.allclose(found, expected, atol=1e-6), args


@pytest.mark.parametrize("name", OPERATIONS)
def test_what_mixes_the_last_dimension_is_not_done(name):
    for args in CASES[name][1]:
        assert OPERATIONS[name](X, *args) is None, args


def test_a_dimension_of_one_is_squeezed():
    x = torch.randn(2, 1, 3, 4, 6)
    assert torch.equal(OPERATIONS["squeeze"](x, 1), x.squeeze(1))


def test_every_name_is_an_operation():
    assert {*FUNCTIONS.values(), *METHODS.values()} <= {*OPERATIONS, *TYPE_CHANGES}
