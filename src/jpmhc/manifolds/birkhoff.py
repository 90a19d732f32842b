r"""The Birkhoff polytope: doubly stochastic matrices, reached by Sinkhorn–Knopp.

`project` runs Alg. sinkhorn-forward from logits X to a matrix P without recording the iterations for autograd. The
derivative is implicit: a change dX moves P by $P \odot (dX - u 1^\top - 1 v^\top)$, with u and v such that the row and
column sums stay fixed. This map is self-adjoint, so one function of P serves reverse mode and forward mode. See
docs/derivations/sinkhorn.md.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from jpmhc import checks, modes, precision

# Alg. sinkhorn-forward clamps the logits to ±10. An integer, because torch.compile with dynamic=True treats floats as
# variable and then fails on two projections in one graph.
LOGIT_BOUND = 10
GRADIENTS = ("direct", "gauss_seidel", "unrolled")
SIDES = ("rows", "columns")


def project(
    logits: Tensor,
    iterations: int = 20,
    tolerance: float | None = None,
    gradient: str = "direct",
    *,
    eps: float = 0.0,
    clamp: float | None = LOGIT_BOUND,
    first: str = "rows",
    gradient_iterations: int | None = None,
) -> Tensor:
    r"""Turn logits into doubly stochastic matrices with Sinkhorn–Knopp iterations.

    Args:
        logits: Any real matrices. [..., n, n]
        iterations: Row-then-column normalisations, T = 20 in the paper.
        tolerance: Freeze a matrix once its row sums differ from one by at most this much. The loop's length never
            depends on the data.
        gradient: `"direct"` solves the equations for u and v exactly; `"gauss_seidel"` is the paper's iteration, which
            stalls near permutation matrices; `"unrolled"` differentiates the recorded loop, the only way
            under `torch.jit.trace`.
        eps: A number that is added, as in DeepSeek-V4, to the entries after the first normalisation, which is a
            softmax, and to the sums by which all later normalisations divide. Needs the gradient `"unrolled"`.
        clamp: Bound of the logits' absolute values. None: no bound; then eps must keep the sums above zero.
        first: The side, `"rows"` or `"columns"`, that is normalised first in every iteration.
        gradient_iterations: Iterations k of `"gauss_seidel"`. None: from the paper's formula, 16 at n = 4.

    Returns:
        Matrices [..., n, n] whose rows or columns, whichever are normalised last, sum to one, up to eps. The sums of
        the other side approach one as the iterations converge; `violation` measures the deviation.

    Note:
        The gradient is zero where a logit was clipped (the paper's backward pass ignores the clamp).
        A NaN spreads over its own matrix alone; an infinite logit is clipped like any large logit.

    >>> matrix = project(torch.tensor([[1.0, 0.0], [0.0, 1.0]]))
    >>> matrix.sum(-1).tolist(), matrix.sum(-2).tolist()
    ([1.0, 1.0], [1.0, 1.0])
    """
    checks.square(logits, "logits")
    check_settings(iterations, tolerance, gradient, eps, clamp, first, gradient_iterations)
    return normalise(logits, iterations, tolerance, gradient, eps, clamp, first, gradient_iterations)


def check_settings(
    iterations: int,
    tolerance: float | None,
    gradient: str,
    eps: float,
    clamp: float | None,
    first: str,
    gradient_iterations: int | None = None,
) -> None:
    """Raise a ValueError if a setting of `project` is invalid, or cannot be combined with the other settings."""
    checks.whole_number(iterations, "iterations")
    checks.choice(gradient, GRADIENTS, "gradient")
    checks.choice(first, SIDES, "side to normalise first")
    checks.inside(eps, "[0, 1)", "eps")
    for value, name in ((tolerance, "tolerance"), (clamp, "clamp")):
        if value is not None:
            checks.positive_number(value, name)
    if gradient_iterations is not None:
        checks.whole_number(gradient_iterations, "gradient_iterations")
        if gradient != "gauss_seidel":
            raise ValueError('gradient_iterations is for gradient="gauss_seidel"; the other gradients do not iterate')
    if clamp is None and not eps:
        raise ValueError("clamp=None needs an eps above 0, which keeps the sums that divide above zero")
    if eps and (gradient != "unrolled" or tolerance is not None):
        raise ValueError(
            'an eps needs gradient="unrolled" and no tolerance: iterations with an eps have no limit to differentiate'
        )


def normalise(
    logits: Tensor,
    iterations: int,
    tolerance: float | None,
    gradient: str,
    eps: float,
    clamp: float | None,
    first: str,
    gradient_iterations: int | None = None,
) -> Tensor:
    """Turn logits into doubly stochastic matrices like `project`, without checking the settings."""
    if first == "columns":
        return normalise(logits.mT, iterations, tolerance, gradient, eps, clamp, "rows", gradient_iterations).mT
    logits = precision.single_or_double(logits)
    with precision.without_autocast(logits):
        if eps:
            return _iterate(logits if clamp is None else logits.clamp(-clamp, clamp), iterations, eps)
        assert clamp is not None  # check_settings
        if gradient == "unrolled" or not _is_differentiated():
            return _sinkhorn(logits, iterations, tolerance, clamp)
        # A jvp on the Function breaks compiled backward in torch 2.13.
        function = _Projection if torch.compiler.is_compiling() else _ForwardModeProjection
        steps = None if gradient == "direct" else gradient_iterations or gauss_seidel_steps(logits.shape[-1])
        return function.apply(logits, iterations, tolerance, steps, clamp)[0]


def violation(matrix: Tensor) -> Tensor:
    """Return the largest deviation of a row or column sum from one, or of an entry below zero, per matrix. [...]

    >>> float(violation(torch.full((2, 2), 0.5)))
    0.0
    """
    checks.square(matrix)
    rows = (matrix.sum(-1) - 1).abs().amax(-1)
    columns = (matrix.sum(-2) - 1).abs().amax(-1)
    negative = (-matrix).clamp(min=0).amax((-2, -1))
    return torch.maximum(torch.maximum(rows, columns), negative)


def sample(n: int, shape: tuple[int, ...] = (), *, generator: torch.Generator | None = None) -> Tensor:
    """Draw doubly stochastic matrices: converged Sinkhorn projections of standard normal logits. [*shape, n, n]

    >>> sample(4, (3,)).shape
    torch.Size([3, 4, 4])
    """
    checks.whole_number(n, "n")
    logits = torch.randn(*checks.sizes(shape, "shape"), n, n, generator=generator, dtype=torch.float64)
    return _sinkhorn(logits, iterations=1000, tolerance=1e-15)


def _iterate(logits: Tensor, iterations: int, eps: float) -> Tensor:
    """Normalise rows (the first time by a softmax) and columns in turn, with the eps that `project` describes."""
    matrix = logits.softmax(-1) + eps
    for step in range(iterations):
        if step:
            matrix = matrix / (matrix.sum(-1, keepdim=True) + eps)
        matrix = matrix / (matrix.sum(-2, keepdim=True) + eps)
    return matrix


def _sinkhorn(logits: Tensor, iterations: int, tolerance: float | None, clamp: float = LOGIT_BOUND) -> Tensor:
    r"""Return $P = \operatorname{diag}(u)\, K \operatorname{diag}(v)$ with u and v from Alg. sinkhorn-forward.

    K is exp(clamped logits), divided by the largest entry of each row. The clamp keeps K's entries above e^-20. So u
    and v neither overflow nor underflow, and the paper's slow logarithms are not needed.
    """
    clamped = logits.clamp(-clamp, clamp)
    k = (clamped - clamped.detach().amax(-1, keepdim=True)).exp()
    transposed, multiply = k.mT, _choose_product(k)
    u = v = torch.ones_like(k[..., :1])
    for step in range(iterations):
        rows = multiply(k, v)
        new_u = rows.reciprocal()
        new_v = multiply(transposed, new_u).reciprocal()
        if tolerance is None or step == 0:
            u, v = new_u, new_v
        else:
            # The column sums are exact after every step, so the row sums say whether a matrix has converged.
            converged = (u * rows - 1).abs().amax(-2, keepdim=True) <= tolerance
            u, v = torch.where(converged, u, new_u), torch.where(converged, v, new_v)
    return u * k * v.mT


def _choose_product(matrix: Tensor) -> Callable[[Tensor, Tensor], Tensor]:
    """Return the fastest function that multiplies matrices like `matrix` [..., n, n] by columns [..., n, 1]."""
    # On the CPU matmul is one operator instead of two. Compiled code would call a library for it, and a GPU might
    # compute it with reduced precision.
    if matrix.is_cpu and not torch.compiler.is_compiling():
        return torch.bmm if matrix.ndim == 3 else torch.matmul
    return lambda matrix, column: (matrix * column.mT).sum(-1, keepdim=True)


def _is_differentiated() -> bool:
    if not torch.compiler.is_compiling() and torch._C._is_tracing():
        return False  # torch.jit.trace cannot record a derivative: it differentiates the iterations
    return torch.is_grad_enabled() or torch.compiler.is_compiling() or modes.is_transformed()


def gauss_seidel_steps(n: int) -> int:
    """Return the number of Gauss–Seidel iterations of eq. gs-iters, between 10 and 50 (the paper has 16 at n = 4)."""
    steps = math.ceil(math.log(0.01) / math.log(1 - 1 / n) - 0.01) if n > 1 else 1
    return min(max(steps, 10), 50)


def _tangent(p: Tensor, direction: Tensor, steps: int | None = None) -> Tensor:
    r"""Return $P \odot (D - u 1^\top - 1 v^\top)$ (eq. implicit-grad) for the direction D. [..., n, n]

    u and v make all row and column sums zero: exactly if `steps` is None, else by the paper's iteration.
    """
    if steps is not None:
        return _tangent_gauss_seidel(p, direction, steps)
    # Eliminating v leaves the Laplacian of the graph with weights P diag(1/c) P^T, which fixes u up to a constant.
    # Sums of differences, because differences of sums would cancel when P is near a permutation.
    share = p / p.sum(-2, keepdim=True)  # the share of column j's sum that lies in row k
    paths = share.unsqueeze(-3) * p.unsqueeze(-2)  # [..., i, k, j]
    right = (paths * (direction.unsqueeze(-2) - direction.unsqueeze(-3))).sum((-2, -1))
    left = direction - _solve_laplacian(paths.sum(-1), right).unsqueeze(-1)
    return (paths * (left.unsqueeze(-2) - left.unsqueeze(-3))).sum(-2)


def _tangent_gauss_seidel(p: Tensor, direction: Tensor, steps: int) -> Tensor:
    """Return `_tangent` with u and v from `steps` steps of the paper's iteration (Alg. sinkhorn-implicit-bwd)."""
    h = p * direction
    h_row, h_col = h.sum(-1), h.sum(-2)  # eq. h-row-col
    v = torch.zeros_like(h_col)
    for _ in range(steps):
        u = h_row - (p * v.unsqueeze(-2)).sum(-1)  # eq. coupled-u
        v = h_col - (p * u.unsqueeze(-1)).sum(-2)  # eq. coupled-v
    return h - p * u.unsqueeze(-1) - p * v.unsqueeze(-2)


def _solve_laplacian(weights: Tensor, right: Tensor) -> Tensor:
    """Solve L u = `right` [..., n] for the u that is 0 at the last of n nodes.

    L is the Laplacian of the graph whose links have the `weights` [..., n, n].
    Nodes are eliminated one by one (star–mesh transform) without subtractions, so nothing cancels in a nearly
    disconnected graph, which belongs to a P near a permutation.
    """
    n = weights.shape[-1]
    links: list[Tensor] = []  # row k towards the nodes after it, divided by their sum
    loads: list[Tensor] = []
    for _ in range(n - 1):
        row = weights[..., 0, 1:]
        degree = row.sum(-1, keepdim=True)
        inverse = torch.where(degree > 0, 1 / torch.where(degree > 0, degree, 1), 0)
        link = row * inverse
        load = right[..., :1] * inverse
        right = right[..., 1:] + row * load
        weights = weights[..., 1:, 1:] + row.unsqueeze(-1) * link.unsqueeze(-2)
        links.append(link)
        loads.append(load)
    u = torch.zeros_like(right)
    for link, load in zip(reversed(links), reversed(loads)):
        u = torch.cat([load + (link * u).sum(-1, keepdim=True), u], -1)
    return u


class _Projection(torch.autograd.Function):
    """Sinkhorn–Knopp with the implicit derivative. The second output marks the logits that were not clipped."""

    generate_vmap_rule = True

    @staticmethod
    def forward(
        logits: Tensor, iterations: int, tolerance: float | None, steps: int | None, clamp: float
    ) -> tuple[Tensor, Tensor]:
        return _sinkhorn(logits, iterations, tolerance, clamp), logits.abs() <= clamp

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        ctx.steps = inputs[3]
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(*output)
        ctx.save_for_forward(*output)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        p, free = ctx.saved_tensors
        return torch.where(free, _tangent(p, gradients[0], ctx.steps), 0), None, None, None, None


class _ForwardModeProjection(_Projection):
    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> tuple[Tensor, None]:
        p, free = ctx.saved_tensors
        return _tangent(p, torch.where(free, tangents[0], 0), ctx.steps), None
