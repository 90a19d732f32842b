"""Statistics of a model's residual mixers: their distance to their set and to the identity, and their product."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from jpmhc.connections import HyperConnection, HyperConnectionStack
from jpmhc.mixers import Mixer


@torch.no_grad()
def mixing_statistics(model: nn.Module, run: Callable[[], object]) -> dict[str, Any]:
    """Measure every H_res of a model while it runs on a few rows.

    Args:
        model: The model, whole on this rank.
        run: Runs it on the rows; a recursive model for one supervision step from fresh states.

    Returns:
        By connection, the mean H_res, the mean distance of H_res to the identity (Frobenius) and the largest violation
        of its set; for the product of all H_res that a token passes in the run, quantiles of its singular values and
        the share of them below 0.1; its mean singular values after each connection, and beside them those of as many
        random skips of the same mixer. Empty for a plain model.
    """
    modules = {name: m for name, m in model.named_modules() if isinstance(m, HyperConnection)}
    if not modules:
        return {}
    distance: dict[str, list[Tensor]] = {name: [] for name in modules}
    violation: dict[str, list[Tensor]] = {name: [] for name in modules}
    skips: dict[str, list[Tensor]] = {name: [] for name in modules}
    products: list[Tensor] = []

    def record(name: str, skip: Tensor, tokens: int) -> None:
        skip = skip.float().flatten(0, -3)
        eye = torch.eye(skip.shape[-1], dtype=skip.dtype, device=skip.device)
        distance[name].append(torch.linalg.matrix_norm(skip - eye).mean())
        violation[name].append(modules[name].mixer.violation(skip).max())
        wide = skip.double().expand(tokens, -1, -1)  # a deep product may leave float32's range
        skips[name].append(wide.mean(0))
        products.append(wide if not products else wide @ products[-1])

    def observe(name: str, block: HyperConnection) -> Any:
        """Record a connection whenever it runs. A stack with delayed reads calls its connections' maps alone."""
        if name in delayed:
            return block.map.register_forward_hook(
                lambda _, arguments, result: record(name, result[0][2], len(arguments[0]))
            )
        return block.register_forward_pre_hook(
            lambda _, arguments: record(name, block.coefficients(arguments[0]).skip, arguments[0].shape[:-2].numel())
        )

    stacks = {name: m for name, m in model.named_modules() if isinstance(m, HyperConnectionStack) and m.delayed}
    delayed = {f"{stack}.connections.{k}".lstrip(".") for stack, m in stacks.items() for k in range(len(m.connections))}
    handles = [observe(name, block) for name, block in modules.items()]
    try:
        run()
    finally:
        for handle in handles:
            handle.remove()
    values = torch.linalg.svdvals(torch.stack(products))  # [depth, tokens, n]
    last = values[-1].flatten()
    low, middle, high = last.quantile(last.new_tensor([0.0, 0.5, 1.0])).tolist()
    mixer = next(iter(modules.values())).mixer
    return {
        "skips": {name: _round_all(torch.stack(s).mean(0)) for name, s in skips.items()},
        "distance_to_identity": {name: torch.stack(d).mean().item() for name, d in distance.items()},
        "violation": {name: torch.stack(v).max().item() for name, v in violation.items()},
        "product_singular_values": {"smallest": low, "median": middle, "largest": high},
        "product_collapsed": (last < 0.1).double().mean().item(),
        "product_over_depth": _round_all(values.mean(1)),
        "random_product_over_depth": _round_all(_random_product_over_depth(mixer, len(products))),
    }


def _random_product_over_depth(mixer: Mixer, depth: int, draws: int = 64) -> Tensor:
    """Return the mean singular values of products of 1, …, depth random skips, as the theory draws them. [depth, n]"""
    drawn = type(mixer).sample(mixer.streams, (depth, draws), generator=torch.Generator().manual_seed(0))
    products = [drawn[0]]
    for skip in drawn[1:]:
        products.append(skip @ products[-1])
    return torch.linalg.svdvals(torch.stack(products)).mean(1)


def _round_all(values: Tensor) -> list[list[float]]:
    """Round a matrix to six digits per number, which is enough for readers of the log."""
    return [[float(f"{value:.6g}") for value in row] for row in values.tolist()]
