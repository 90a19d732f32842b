r"""The Grassmann manifold: p-dimensional subspaces of R^n, stored as frames or as projectors.

A frame U is an n × p matrix whose columns are an orthonormal basis of the subspace; its projector is $UU^\top$.
"""

import torch
from torch import Tensor

from jpmhc import checks, precision


def projector(frame: Tensor) -> Tensor:
    r"""Compute $UU^\top$ for an orthonormal frame U (eq. grassmann-projector). [..., n, p] → [..., n, n]"""
    checks.tall(frame)
    frame = precision.single_or_double(frame)
    with precision.without_autocast(frame):
        return frame @ frame.mT


def orthonormalize(frame: Tensor) -> Tensor:
    """Return an orthonormal basis of a frame's span: Q of the frame's QR factors (eq. qr-retraction). [..., n, p]

    Gram–Schmidt batches well and, with every column projected twice, is as accurate as Householder's method. A frame
    with a zero column, or with columns that are dependent to rounding, becomes NaN; other frames of the batch do not.
    """
    _, rank = checks.tall(frame)
    frame = precision.single_or_double(frame)
    frame = frame / frame.detach().abs().amax(-2, keepdim=True)  # squares of huge columns would overflow
    rounding = 4 * frame.shape[-2] * torch.finfo(frame.dtype).eps
    columns: list[Tensor] = []
    for j in range(rank):
        column = frame[..., j]
        for _ in range(2):
            for done in columns:
                column = column - done * (done * column).sum(-1, keepdim=True)
        length = column.norm(dim=-1, keepdim=True)
        dependent = length <= rounding * frame[..., j].norm(dim=-1, keepdim=True)
        columns.append(column / length.masked_fill(dependent, torch.nan))
    return torch.stack(columns, -1)


def project(frame: Tensor) -> Tensor:
    """Compute the projector onto the span of any full-rank frame. [..., n, p] → [..., n, n]

    >>> matrix = project(torch.randn(4, 2))
    >>> bool(((matrix @ matrix - matrix).abs() < 1e-5).all())
    True
    """
    return projector(orthonormalize(frame))


def horizontal(frame: Tensor, grad: Tensor) -> Tensor:
    r"""Return $(I - UU^\top)\nabla$, the part of a gradient ∇ that moves the span of a frame U (eq. horizontal-proj).

    [..., n, p]
    """
    checks.tall(frame)
    if grad.shape != frame.shape:
        raise ValueError(f"the gradient must have the frame's shape {list(frame.shape)}, got {list(grad.shape)}")
    with precision.without_autocast(frame):
        return grad - frame @ (frame.mT @ grad)


def retract(frame: Tensor, direction: Tensor, step: float | Tensor, iterations: int | None = 2) -> Tensor:
    r"""Move a frame along a tangent direction by the Cayley retraction.

    Args:
        frame: Orthonormal frame U. [..., n, p]
        direction: Tangent direction M, usually horizontal. [..., n, p]
        step: Length of the step; negative to descend along a gradient.
        iterations: Fixed-point steps of eq. cayley-retract-iter (2 in the paper); None: the exact solution.

    Returns:
        The new frame. The exact solution is orthonormal; fixed-point steps deviate from it by terms of higher order in
        the step. [..., n, p]
    """
    n, _ = checks.tall(frame)
    checks.optional_whole_number(iterations, "iterations")
    if direction.shape != frame.shape:
        raise ValueError(f"the direction must have the frame's shape {list(frame.shape)}, got {list(direction.shape)}")
    with precision.without_autocast(frame):
        half = (direction @ frame.mT - frame @ direction.mT) * (step / 2)  # eq. skew-direction
        if iterations is None:
            identity = torch.eye(n, dtype=frame.dtype, device=frame.device)
            return torch.linalg.solve(identity - half, frame + half @ frame)
        y = frame + step * direction  # eq. cayley-retract-init
        for _ in range(iterations):
            y = frame + half @ (frame + y)  # eq. cayley-retract-iter
        return y


def violation(matrix: Tensor) -> Tensor:
    r"""Return the largest absolute entry of $P - P^\top$ and $P^2 - P$, zero for orthogonal projectors P. [...]

    >>> float(violation(torch.diag(torch.tensor([1.0, 0.0]))))
    0.0
    """
    checks.square(matrix)
    with precision.without_autocast(matrix):
        idempotence = (matrix @ matrix - matrix).abs().amax((-2, -1))
    return torch.maximum(idempotence, (matrix - matrix.mT).abs().amax((-2, -1)))


def default_rank(n: int) -> int:
    """Return the paper's default rank p = ⌊n/2⌋, but at least one."""
    return max(n // 2, 1)


def sample_frame(
    n: int, rank: int | None = None, shape: tuple[int, ...] = (), *, generator: torch.Generator | None = None
) -> Tensor:
    """Draw orthonormal bases of uniform random subspaces of dimension `rank` (or `default_rank`). [*shape, n, rank]"""
    checks.whole_number(n, "n")
    rank = default_rank(n) if rank is None else rank
    if not 1 <= rank <= n:
        raise ValueError(f"rank must be between 1 and n = {n}, got {rank}")
    gaussian = torch.randn(*checks.sizes(shape, "shape"), n, rank, generator=generator, dtype=torch.float64)
    return orthonormalize(gaussian)


def sample(
    n: int, rank: int | None = None, shape: tuple[int, ...] = (), *, generator: torch.Generator | None = None
) -> Tensor:
    """Draw projectors onto uniform random subspaces of dimension `rank` (or `default_rank`). [*shape, n, n]

    >>> sample(4, 2, (3,)).shape
    torch.Size([3, 4, 4])
    """
    return projector(sample_frame(n, rank, shape, generator=generator))
