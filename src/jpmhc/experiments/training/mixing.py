"""Statistics of a model's mixing matrices H_res: distance to the mixer's set and to the identity, and products."""

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from jpmhc.connections import HyperConnection
from jpmhc.connections.contract import State
from jpmhc.mixers import Mixer


@torch.no_grad()
def mixing_statistics(model: nn.Module, run: Callable[[], object]) -> dict[str, Any]:
    """Run a whole, unsharded model on a few rows, and return statistics of its connections' mixing matrices H_res.

    For each connection: the mean H_res, its mean Frobenius distance to the identity, and the largest distance to the
    mixer's set of matrices. For the product of all H_res that a token passes: quantiles of the singular values, and the
    share of singular values below 0.1. After each connection: the product's mean singular values, for the model and for
    random matrices of the same mixer. The result is empty for a plain model.
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

    def observe(name: str, block: HyperConnection) -> AbstractContextManager[None]:
        """Return a context in which the connection's H_res are recorded at every read."""

        def read(block: HyperConnection, x: Tensor) -> tuple[Tensor, State]:
            record(name, block.coefficients(x).skip, x.shape[:-2].numel())
            return block.read_in_best_form(x)

        return block.computed_by(read)

    with ExitStack() as contexts:
        for name, block in modules.items():
            contexts.enter_context(observe(name, block))
        run()
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
    """Return the mean singular values of products of 1, …, depth random matrices from `Mixer.sample`. [depth, n]"""
    drawn = type(mixer).sample(mixer.streams, (depth, draws), generator=torch.Generator().manual_seed(0))
    products = [drawn[0]]
    for skip in drawn[1:]:
        products.append(skip @ products[-1])
    return torch.linalg.svdvals(torch.stack(products)).mean(1)


def _round_all(values: Tensor) -> list[list[float]]:
    """Return a matrix as lists of numbers that are rounded to six digits, for the log."""
    return [[float(f"{value:.6g}") for value in row] for row in values.tolist()]
