"""Statistics of the matrices H_res, [n, n], by which a model's connections mix their n streams on the skip path."""

from collections.abc import Callable, Iterable
from contextlib import ExitStack
from itertools import accumulate

import torch
from torch import Tensor, nn

from jpmhc.connections import HyperConnection
from jpmhc.connections.contract import State
from jpmhc.files import JsonObject
from jpmhc.mixers import Mixer


@torch.no_grad()
def mixing_statistics(model: nn.Module, run: Callable[[], object]) -> JsonObject:
    """Return statistics of the mixing matrices H_res in a call of `run`, which runs the unsharded model on a few rows.

    For each connection: the mean H_res, the mean Frobenius distance of H_res to the identity, and the largest distance
    to the mixer's set of matrices. For the product of all H_res that a token passes: quantiles of the singular values,
    and the share of singular values below 0.1. For the products up to each depth: the mean singular values, for the
    model and for random matrices of the same mixer. The result is empty for a plain model.
    """
    names = {block: name for name, block in model.named_modules() if isinstance(block, HyperConnection)}
    if not names:
        return {}
    calls: list[tuple[HyperConnection, Tensor]] = []

    def read(block: HyperConnection, x: Tensor) -> tuple[Tensor, State]:
        skip = block.coefficients(x).skip.double().flatten(0, -3)  # a deep product may leave float32's range
        calls.append((block, skip.expand(x.shape[:-2].numel(), -1, -1)))
        return block.read_in_best_form(x)

    with ExitStack() as contexts:
        for block in names:
            contexts.enter_context(block.computed_by(read))
        run()
    products = _multiply_up(skip for _, skip in calls)
    values = torch.linalg.svdvals(torch.stack(products))  # [depth, tokens, n]
    last = values[-1].flatten()
    low, middle, high = last.quantile(last.new_tensor([0.0, 0.5, 1.0])).tolist()
    mixer, eye = next(iter(names)).mixer, torch.eye(values.shape[-1]).to(values)
    skips = {name: torch.stack([skip for called, skip in calls if called is block]) for block, name in names.items()}
    return {
        "skips": {name: _round_all(own.mean((0, 1))) for name, own in skips.items()},
        "distance_to_identity": {
            name: torch.linalg.matrix_norm(own - eye).mean().item() for name, own in skips.items()
        },
        "violation": {name: block.mixer.violation(skips[name]).max().item() for block, name in names.items()},
        "product_singular_values": {"smallest": low, "median": middle, "largest": high},
        "product_collapsed": (last < 0.1).double().mean().item(),
        "product_over_depth": _round_all(values.mean(1)),
        "random_product_over_depth": _round_all(_random_product_over_depth(mixer, len(products))),
    }


def _random_product_over_depth(mixer: Mixer, depth: int, draws: int = 64) -> Tensor:
    """Return the mean singular values of products of 1, …, depth random matrices from `Mixer.sample`. [depth, n]"""
    drawn = type(mixer).sample(mixer.streams, (depth, draws), generator=torch.Generator().manual_seed(0))
    return torch.linalg.svdvals(torch.stack(_multiply_up(drawn))).mean(1)


def _multiply_up(skips: Iterable[Tensor]) -> list[Tensor]:
    """Return the products of the first 1, 2, 3, … matrices; the first matrix is the rightmost factor."""
    return list(accumulate(skips, lambda product, skip: skip @ product))


def _round_all(values: Tensor) -> list[list[float]]:
    """Return a matrix as lists of numbers with six significant digits, for the log."""
    return [[float(f"{value:.6g}") for value in row] for row in values.tolist()]
