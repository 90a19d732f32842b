"""SignSGD against another implementation on dense input, and against NumPy on touched rows."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from jpmhc.optim import SignSGD


def test_dense_input_equals_the_other_implementation():
    from pytorch_optimizer import SignSGD as OtherSignSGD  # here: the file's other tests run without it

    ours = torch.randn(6, 4, generator=torch.Generator().manual_seed(0)).requires_grad_()
    theirs = ours.detach().clone().requires_grad_()
    mine = SignSGD([ours], lr=0.02, weight_decay=0.3)
    other = OtherSignSGD([theirs], lr=0.02, momentum=0.0, weight_decay=0.3)
    for t in range(10):
        gradient = torch.randn(6, 4, generator=torch.Generator().manual_seed(t))
        gradient[t % 6] = 0
        ours.grad, theirs.grad = gradient.clone(), gradient.clone()
        mine.step()
        other.step()
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-7)


def test_touched_rows_alone_move_and_repeats_add_up():
    lr, decay = 0.1, 0.5
    table = torch.arange(20, dtype=torch.float64).reshape(5, 4).requires_grad_()
    ids = torch.tensor([3, 1, 3, 3])
    # Row 3's gradients add up to (0, +, −, −): the sign of the sum, which no single lookup has.
    grads = np.array([[1, 2, -5, 0.5], [-1, 1, 0, 2], [1, -1, 2, 0.25], [-2, 0.5, 1, -1]])
    (F.embedding(ids, table, sparse=True) * torch.from_numpy(grads)).sum().backward()
    assert table.grad is not None
    assert table.grad.is_sparse
    expected = np.arange(20, dtype=np.float64).reshape(5, 4)
    for row in (1, 3):
        total = grads[ids.numpy() == row].sum(0)
        expected[row] = expected[row] * (1 - lr * decay) - lr * np.sign(total)
    SignSGD([table], lr=lr, weight_decay=decay).step()
    np.testing.assert_array_equal(table.detach().numpy(), expected)


def test_a_huge_table_costs_what_its_batch_costs():
    """The gradient of 200,000 rows stays sparse, and rows never looked up keep their bits."""
    table = torch.zeros(200_000, 8).requires_grad_()
    ids = torch.tensor([199_999, 7])
    F.embedding(ids, table, sparse=True).sum().backward()
    assert table.grad is not None
    assert table.grad._values().shape == (2, 8)
    SignSGD([table], lr=0.01).step()
    assert torch.equal(table.detach().abs().sum(1).nonzero().squeeze(1), torch.tensor([7, 199_999]))
    assert torch.equal(table[7].detach(), torch.full((8,), -0.01))


@pytest.mark.parametrize(("arguments", "message"), [({"lr": -1.0}, "lr"), ({"weight_decay": -1.0}, "weight_decay")])
def test_bad_arguments_are_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        SignSGD([torch.zeros(2, 2, requires_grad=True)], **arguments)
