"""SignSGD for embedding tables: a step changes only the rows that the batch looked up."""

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim.optimizer import ParamsT

from jpmhc.optim.base import GroupwiseOptimizer, ParameterGroup


class SignSGD(GroupwiseOptimizer):
    r"""SignSGD: :math:`p \leftarrow p(1 - \eta\lambda) - \eta \operatorname{sign}(g)`, only for rows with a gradient.

    p is an entry of a table and g its gradient, :math:`\eta` the learning rate and :math:`\lambda` the weight decay. A
    table looked up with ``F.embedding(ids, table, sparse=True)`` receives a sparse gradient, one row per lookup.
    Gradients of the same row are added first. Only rows that were looked up decay and move, so the cost depends on the
    batch and not on the table. A dense gradient moves every entry.

    With ``gather=True`` and an initialised process group, the rows of all ranks are collected before the sign is taken,
    and every rank applies the same update to its own copy of the table. Every rank must look up equally many rows.

    The update is deterministic and never waits for the device: gradients of equal ``ids`` are summed by one matrix
    product of a fixed shape, and all copies of a repeated row write the same numbers.

    Args:
        params: Tables or groups of them.
        lr: Learning rate; 1e-2 for the puzzle table (Table training-config).
        weight_decay: Decoupled weight decay of the rows that were looked up.
        gather: Collect sparse rows from all ranks. Dense gradients must be reduced by the caller.
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
        params: ParamsT,
        lr: float = 1e-2,
        weight_decay: float = 0.0,
        *,
        gather: bool = True,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        super().__init__(params, dict(lr=lr, weight_decay=weight_decay))
        self.gather = gather
        self.group = group

    def update_group(self, group: ParameterGroup) -> None:
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

    def _touched(self, grad: Tensor) -> tuple[Tensor, Tensor]:
        """Return the row number [k] and the gradient row [k, d] of each lookup on all ranks, in rank order."""
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
    """Return one row per lookup: the sum of the gradient rows of all lookups of the same table row. [k, d]"""
    same = ids[:, None] == ids[None, :]  # [k, k]
    total = same.to(rows.dtype) @ rows  # [k, d]
    # Equal identifiers use one and the same sum, because they must write identical bits.
    return total[same.to(torch.int8).argmax(dim=1)]
