"""Statistics of a model's residual mixers: their distance to their set and to the identity, and their product."""

from typing import Any

import torch
from torch import Tensor, nn

from jpmhc.connections import HyperConnection
from jpmhc.trm.model import RecursiveCore


@torch.no_grad()
def mixing_statistics(core: RecursiveCore, puzzle: Tensor, inputs: Tensor) -> dict[str, Any]:
    """Measure every H_res over one supervision step from fresh states.

    Args:
        core: The model's core, whole on this rank.
        puzzle: Puzzle vectors of a few rows, [B, d].
        inputs: Their tokens, [B, S].

    Returns:
        By connection, the mean distance of H_res to the identity (Frobenius) and the largest violation of its set; and
        for the product of all H_res that a token passes in one supervision step, quantiles of its singular values and
        the share of them below 0.1. Empty for the plain model.
    """
    modules = {name: m for name, m in core.named_modules() if isinstance(m, HyperConnection)}
    if not modules:
        return {}
    distance: dict[str, list[Tensor]] = {name: [] for name in modules}
    violation: dict[str, list[Tensor]] = {name: [] for name in modules}
    product: Tensor | None = None

    def record(name: str, block: HyperConnection, x: Tensor) -> None:
        nonlocal product
        skip = block.coefficients(x).skip.float()
        eye = torch.eye(skip.shape[-1], dtype=skip.dtype, device=skip.device)
        distance[name].append(torch.linalg.matrix_norm(skip - eye).mean())
        violation[name].append(block.mixer.violation(skip).max())
        wide = skip.expand(*x.shape[:-2], *skip.shape[-2:])
        product = wide if product is None else wide @ product

    def hook(name: str) -> Any:
        def before(block: nn.Module, arguments: tuple[Tensor, ...]) -> None:
            assert isinstance(block, HyperConnection)
            record(name, block, arguments[0])

        return before

    handles = [m.register_forward_pre_hook(hook(name)) for name, m in modules.items()]
    try:
        core.run_supervision_step(puzzle, inputs, *core.initial_states(len(inputs)))
    finally:
        for handle in handles:
            handle.remove()
    assert product is not None
    values = torch.linalg.svdvals(product.flatten(0, -3)).flatten()
    levels = torch.tensor([0.0, 0.5, 1.0], dtype=values.dtype, device=values.device)
    low, middle, high = torch.quantile(values, levels).tolist()
    return {
        "distance_to_identity": {name: torch.stack(d).mean().item() for name, d in distance.items()},
        "violation": {name: torch.stack(v).max().item() for name, v in violation.items()},
        "product_singular_values": {"smallest": low, "median": middle, "largest": high},
        "product_collapsed": (values < 0.1).float().mean().item(),
    }
