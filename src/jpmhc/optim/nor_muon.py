r"""NorMuon: an optimiser for hidden matrices whose updates are nearly orthogonal, with rows of similar size.

The momentum $M \leftarrow \beta_1 M + (1 - \beta_1) G$ and the gradient G give $U = (1 - \beta_1) G + \beta_1 M$
(Nesterov). Five steps of a Newton–Schulz iteration turn U into a matrix O with singular values near one. Row i of O
is divided by the root of a running mean of its squares, $v_i \leftarrow \beta_2 v_i + (1 - \beta_2)
\operatorname{mean}_j O_{ij}^2$, and the resulting matrix is scaled to the Frobenius norm of O. A parameter [m, n] moves
by this matrix times $-\eta \sqrt{\max(1, m/n)}$, with the learning rate $\eta$ (Li et al., "NorMuon: Making Muon more
efficient and scalable", 2025).
"""

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from jpmhc.optim.base import GroupwiseOptimizer, ParameterGroup

# Coefficients of a x + b x³ + c x⁵, whose iteration quickly brings all numbers in (0, 1] near one (Jordan, 2024).
_QUINTIC = (3.4445, -4.7750, 2.0315)
_STEPS = 5
_SMALL = 1e-10


class NorMuon(GroupwiseOptimizer):
    """The NorMuon optimiser for matrices; matrices of one shape are updated together.

    >>> weight = torch.nn.Parameter(torch.eye(4))
    >>> optimiser = NorMuon([weight], lr=0.1)
    >>> weight.grad = torch.diag(torch.tensor([1.0, 2.0, 3.0, 4.0]))
    >>> optimiser.step()
    >>> bool((weight.diagonal() < 1).all())
    True

    Args:
        params: Matrices, or groups of them.
        lr: Learning rate, which is about the size of an update's singular values. A group's `lr` may be replaced by a
            tensor on the matrices' device, which a CUDA graph reads at every replay.
        betas: Decay of the momentum and of the rows' squares.
        weight_decay: Decoupled weight decay.
    """

    def __init__(
        self, params: ParamsT, lr: float = 1.66e-3, betas: tuple[float, float] = (0.95, 0.95), weight_decay: float = 0.0
    ) -> None:
        super().__init__(params, dict(lr=lr, betas=betas, weight_decay=weight_decay))
        for group in self.param_groups:
            for matrix in group["params"]:
                if matrix.ndim != 2:
                    raise ValueError(f"NorMuon is for matrices, not for a parameter of shape {tuple(matrix.shape)}")

    def update_group(self, group: ParameterGroup) -> None:
        alike: dict[tuple[torch.Size, torch.device, torch.dtype], list[Tensor]] = {}
        for matrix in group["params"]:
            if matrix.grad is not None:
                alike.setdefault((matrix.shape, matrix.device, matrix.dtype), []).append(matrix)
        for matrices in alike.values():
            self._move(matrices, group["lr"], group["betas"], group["weight_decay"])

    def _move(
        self, matrices: list[Tensor], lr: float | Tensor, betas: tuple[float, float], weight_decay: float
    ) -> None:
        gradients = [matrix.grad for matrix in matrices if matrix.grad is not None]
        states = [self.state[matrix] for matrix in matrices]
        for matrix, state in zip(matrices, states):
            if not state:
                state["momentum"] = torch.zeros_like(matrix)
                state["squares"] = matrix.new_zeros(len(matrix), 1)
        momenta = [state["momentum"] for state in states]
        torch._foreach_lerp_(momenta, gradients, 1 - betas[0])
        updates = torch.stack(torch._foreach_lerp(gradients, momenta, betas[0]))
        orthogonal = orthogonalise(updates).float().contiguous()
        squares = torch.stack([state["squares"] for state in states]).float()
        squares.lerp_(orthogonal.square().mean(-1, keepdim=True), 1 - betas[1])
        torch._foreach_copy_([state["squares"] for state in states], list(squares.unbind()))
        scaled = orthogonal / (squares.sqrt() + _SMALL)
        rows, columns = matrices[0].shape
        sizes = [torch.linalg.vector_norm(one, dim=(-2, -1), keepdim=True) for one in (orthogonal, scaled)]
        scaled *= sizes[0] / (sizes[1] + _SMALL) * (-lr * max(1.0, rows / columns) ** 0.5)
        torch._foreach_mul_(matrices, 1 - lr * weight_decay)
        torch._foreach_add_(matrices, list(scaled.to(matrices[0].dtype).unbind()))


def orthogonalise(matrices: Tensor) -> Tensor:
    """Return the matrices with their singular values moved to between 0.69 and 1.2. [..., m, n]

    Singular values below 0.3 % of a matrix's Frobenius norm end lower. The iteration runs in bfloat16 on a GPU, and in
    float32 elsewhere.

    >>> torch.linalg.svdvals(orthogonalise(torch.diag(torch.tensor([1.0, 2.0, 4.0])))).round(decimals=1).max() <= 1.2
    tensor(True)
    """
    x = matrices.to(torch.bfloat16 if matrices.is_cuda else torch.float32)
    wide = x.shape[-2] <= x.shape[-1]
    x = x if wide else x.mT
    x = x / (torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True) + 1e-7)
    a, b, c = _QUINTIC
    for _ in range(_STEPS):
        square = x @ x.mT
        x = a * x + (b * square + c * square @ square) @ x
    return x if wide else x.mT
