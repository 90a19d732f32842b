"""SignSGD for embedding tables: only the rows that a batch touched move."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim.optimizer import Optimizer

from jpmhc import checks


class SignSGD(Optimizer):
    r"""Moves parameters by the gradient's sign: :math:`p \leftarrow p(1 - \eta\lambda) - \eta \operatorname{sign}(g)`.

    A table looked up with ``F.embedding(ids, table, sparse=True)`` receives a sparse gradient, one row per lookup. Rows
    looked up more than once add their gradients first; only touched rows are decayed and moved, so the cost is that of
    the batch and not of the table. A dense gradient moves every entry.

    With ``gather=True`` and an initialised process group, the rows of all ranks are collected before the sign is taken,
    and every rank applies the same update to its own copy of the table. Every rank must look up equally many rows.

    The update is deterministic and never waits for the device: sums over equal identifiers are one matrix product of a
    fixed shape, and the copies of a repeated row all write the same number.

    Args:
        params: Tables or groups of them.
        lr: Learning rate; 1e-2 for the puzzle table (Table training-config).
        weight_decay: Decoupled weight decay of touched rows.
        gather: Collect sparse rows from all ranks. Dense gradients are the caller's to reduce.
        group: Process group to gather over; None is the default group.

    >>> table = torch.nn.Parameter(torch.ones(3, 2))
    >>> optimizer = SignSGD([table], lr=0.1, weight_decay=0.0)
    >>> table[0].sum().backward()
    >>> optimizer.step()
    >>> bool(table[0, 0] < 1), table[1, 0].item()
    (True, 1.0)
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-2,
        weight_decay: float = 0.0,
        *,
        gather: bool = True,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        checks.inside(lr, "[0, inf)", "lr")
        checks.inside(weight_decay, "[0, inf)", "weight_decay")
        super().__init__(params, dict(lr=lr, weight_decay=weight_decay))
        self.gather = gather
        self.group = group

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Move the touched rows of every table; returns what ``closure`` returned."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            decay = 1 - group["lr"] * group["weight_decay"]
            for table in group["params"]:
                if table.grad is None:
                    continue
                if not table.grad.is_sparse:
                    table.mul_(decay).sub_(table.grad.sign(), alpha=group["lr"])
                    continue
                ids, rows = self._touched(table.grad)
                moved = table[ids].mul_(decay).sub_(_sum_equal(ids, rows).sign_(), alpha=group["lr"])
                table.index_copy_(0, ids, moved)
        return loss

    def _touched(self, grad: Tensor) -> tuple[Tensor, Tensor]:
        """Return the identifiers [k] and gradient rows [k, d] of every lookup, on all ranks, in rank order."""
        if grad.sparse_dim() != 1:
            raise ValueError(f"a sparse gradient must be sparse in rows alone, not in {grad.sparse_dim()} dimensions")
        ids, rows = grad._indices()[0], grad._values()
        if not (self.gather and dist.is_available() and dist.is_initialized() and dist.get_world_size(self.group) > 1):
            return ids, rows
        return self._gathered(ids), self._gathered(rows)

    def _gathered(self, mine: Tensor) -> Tensor:
        parts = [torch.empty_like(mine) for _ in range(dist.get_world_size(self.group))]
        dist.all_gather(parts, mine.contiguous(), group=self.group)
        return torch.cat(parts)


def _sum_equal(ids: Tensor, rows: Tensor) -> Tensor:
    """Sum for each lookup the rows of all lookups with its identifier."""
    same = ids[:, None] == ids[None, :]  # [k, k]
    total = same.to(rows.dtype) @ rows  # [k, d]
    # Repeated identifiers take the first one's sum: their writes must agree to the bit.
    return total[same.to(torch.int8).argmax(dim=1)]
