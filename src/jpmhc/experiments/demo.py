"""The demonstration: training one deep stack as a plain residual network and with several mixers.

The task is a fixed random function, and all runs take a minute or two on a laptop. The stack is deep enough for the
mixers to differ in the gradients that reach the layers and in the singular values of the product of all skips. A skip
is the matrix with which a layer mixes the residual streams.
"""

import multiprocessing
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor, nn

import jpmhc
from jpmhc import checks
from jpmhc.checks import Count, Positive
from jpmhc.machine import use_threads

PLAIN = "plain"
# Shares of the singular values at which spectra are recorded.
SHARES = np.linspace(0.01, 0.99, 99)
# Steps between two measurements of the loss, and the number of examples for a measurement.
_EVERY, _HELD_OUT = 10, 1024
# Number of last steps over which gradients are averaged.
_TAIL = 20


@dataclass(frozen=True)
class DemoConfig:
    """The settings of the demonstration's models and training."""

    mixers: tuple[str, ...] = ("rotation", "cayley", "sinkhorn", "unconstrained")
    """Mixers to compare with the plain residual network."""
    depth: Count = 48  # Number of layers of the stack.
    dim: Count = 32  # Width of one stream.
    streams: Count = 4  # Number of parallel residual streams.
    steps: Count = 80  # Training steps per run.
    batch: Count = 64  # Examples per step.
    learning_rate: Positive = 2e-3  # Learning rate of AdamW.
    seeds: Count = 3  # Number of runs per mixer, each with its own weights and batches.
    seed: int = 0  # Seed of the task and of the first run.
    workers: Count | None = None  # Number of processes that train at the same time; None: one per core, at most four.

    def __post_init__(self) -> None:
        checks.fields(self)
        checks.fits_memory(64 * self.depth * self.dim**2, f"training {self.depth} layers of width {self.dim}")
        if not self.mixers:
            raise ValueError(f"mixers must name at least one mixer, such as {', '.join(DemoConfig.mixers)}")
        for mixer in self.mixers:
            jpmhc.mixers.make_mixer(mixer, self.streams)

    @property
    def title(self) -> str:
        """A line with the demonstration's settings."""
        return (
            f"{self.depth} pre-norm MLP layers of width {self.dim}, {self.streams} streams, {self.steps} steps of "
            f"AdamW ({self.learning_rate:g}) on {self.batch} examples, {self.count_seeds()}"
        )

    def count_seeds(self) -> str:
        """Return the number of seeds in words, such as "3 seeds"."""
        return f"{self.seeds} seed{'s' if self.seeds > 1 else ''}"


DEFAULT = DemoConfig()


@dataclass
class Spectra:
    """The quantiles 0.01, 0.02, …, 0.99 (`SHARES`) of the singular values of a model's Jacobian at one example."""

    measured: np.ndarray  # quantiles of the measured singular values
    predicted: np.ndarray  # the theory's prediction from the model's coefficients and its sublayers' singular values
    with_modes: np.ndarray  # the theory's prediction if it also knows the matrices that training adds to all sublayers
    apart: float  # largest difference between the measured and the predicted distribution functions (KS)
    apart_with_modes: float  # largest difference between the measured distribution function and the one with modes


@dataclass
class DemoRun:
    """The results of one run."""

    name: str  # mixer, or "plain"
    seed: int  # the run's number
    steps: list[int] = field(default_factory=list)  # steps after which the loss was measured
    # mean squared error on held-out examples, divided by the targets' variance; NaN if the run diverged
    losses: list[float] = field(default_factory=list)
    # norm of the gradient of each layer's weights, averaged over the last steps. [depth]
    gradients: list[float] = field(default_factory=list)
    # singular values of the product of all skips before training, averaged over examples. [streams]
    start: list[float] = field(default_factory=list)
    # singular values of the product of all skips after training, averaged over examples. [streams]
    product: list[float] = field(default_factory=list)
    fresh: Spectra | None = None  # the Jacobian's spectra before training, in the plain network's first run only
    spectra: Spectra | None = None  # the Jacobian's spectra after training, in each model's first run only


def run_demo(
    config: DemoConfig, report: Callable[[str, int, int], None] = lambda name, done, of: None
) -> list[DemoRun]:
    """Train the plain network and every mixer with every seed, and return the runs ordered by mixer and seed.

    After each run, `report` is called with its name, the number of finished runs, and the number of all runs.
    """
    jobs = [(name, seed) for seed in range(config.seeds) for name in (PLAIN, *config.mixers)]
    workers = min(config.workers or min(4, os.cpu_count() or 1), len(jobs))
    runs: dict[tuple[str, int], DemoRun] = {}
    for outcome in _work_through(config, jobs, workers):
        runs[outcome.name, outcome.seed] = outcome
        report(f"{outcome.name}, seed {outcome.seed}", len(runs), len(jobs))
    return [runs[name, seed] for name in (PLAIN, *config.mixers) for seed in range(config.seeds)]


def _work_through(config: DemoConfig, jobs: list[tuple[str, int]], workers: int) -> Iterator[DemoRun]:
    if workers == 1:
        yield from (train_once(config, name, seed) for name, seed in jobs)
        return
    pool = ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn"))
    try:
        for future in as_completed([pool.submit(train_once, config, name, seed) for name, seed in jobs]):
            yield future.result()
    finally:
        pool.shutdown(cancel_futures=True)


def train_once(config: DemoConfig, name: str, seed: int) -> DemoRun:
    """Train the stack with one mixer ("plain": none) and one seed, and return the measurements."""
    with use_threads(1):
        torch.manual_seed(config.seed + seed)
        layers = [make_layer(config.dim) for _ in range(config.depth)]  # the same weights for all mixers of a seed
        model, connections = make_model(name, layers, config.dim, config.streams)
        outcome = DemoRun(name, seed)
        examples = torch.randn(16, config.dim, generator=torch.Generator().manual_seed(config.seed))
        outcome.start = _skip_products(connections, examples).mean(0).tolist()
        if seed == 0 and name == PLAIN:
            outcome.fresh = _compare_with_theory(model, connections, examples[:1])
        _train(config, model, layers, outcome)
        if not np.isfinite(outcome.losses[-1]):
            return outcome
        outcome.product = _skip_products(connections, examples).mean(0).tolist()
        if seed == 0:
            outcome.spectra = _compare_with_theory(model, connections, examples[:1])
    return outcome


class _Residual(nn.Module):
    """The plain residual layer x + f(x)."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return x + self.layer(x)


def make_layer(dim: int) -> nn.Module:
    """Return a layer of the stack: a pre-norm MLP without its residual connection."""
    return nn.Sequential(nn.RMSNorm(dim), nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))


def make_model(
    name: str, layers: list[nn.Module], dim: int, streams: int
) -> tuple[nn.Module, list[jpmhc.HyperConnection]]:
    """Return a model of the layers with the mixer `name` ("plain": none), and a list of its hyper-connections.

    The model takes and returns hidden states [..., dim].
    """
    if name == PLAIN:
        return nn.Sequential(*map(_Residual, layers)), []
    connections = [jpmhc.HyperConnection(layer, dim, streams, name, index=k) for k, layer in enumerate(layers)]
    return jpmhc.HyperConnectionStack(connections, expand=True, reduce=True), connections


def _make_task(config: DemoConfig) -> Callable[[Tensor], Tensor]:
    """Return the function that models learn, a fixed random network with two layers. [..., dim] → [..., dim]"""
    generator = torch.Generator().manual_seed(config.seed)
    first, second = (torch.randn(config.dim, config.dim, generator=generator) / config.dim**0.5 for _ in range(2))
    return lambda x: 2 * torch.tanh(2 * x @ first) @ second


def _train(config: DemoConfig, model: nn.Module, layers: list[nn.Module], outcome: DemoRun) -> None:
    optimizer = torch.optim.AdamW(jpmhc.parameter_groups(model, 0.01), lr=config.learning_rate)
    task = _make_task(config)
    held_out = torch.randn(_HELD_OUT, config.dim, generator=torch.Generator().manual_seed(config.seed + 1))
    variance = task(held_out).var()
    generator = torch.Generator().manual_seed(config.seed + outcome.seed + 2)
    totals = torch.zeros(config.depth)
    tail = min(_TAIL, config.steps)
    for step in range(config.steps + 1):
        if step % _EVERY == 0 or step == config.steps:
            with torch.no_grad():
                loss = (model(held_out) - task(held_out)).square().mean() / variance
            outcome.steps.append(step)
            outcome.losses.append(loss.item() if bool(loss.isfinite()) else float("nan"))
        if step == config.steps or not np.isfinite(outcome.losses[-1]):
            break
        x = torch.randn(config.batch, config.dim, generator=generator)
        optimizer.zero_grad()
        (model(x) - task(x)).square().mean().backward()
        if step >= config.steps - tail:
            totals += torch.stack([_gradient_norm(layer) for layer in layers])
        optimizer.step()
    outcome.gradients = (totals / tail).tolist()


def _gradient_norm(layer: nn.Module) -> Tensor:
    return torch.stack([p.grad.norm() for p in layer.parameters() if p.grad is not None]).norm()


@torch.no_grad()
def _skip_products(connections: list[jpmhc.HyperConnection], x: Tensor) -> Tensor:
    """Return the singular values of the product of all skips for each example in `x` [examples, dim]. [examples, n]

    n is the number of streams. Without connections, the result is a single 1. [1, 1]
    """
    if not connections:
        return torch.ones(1, 1)
    n = connections[0].streams
    streams = jpmhc.expand_streams(x, n)
    product = torch.eye(n)
    for block in connections:
        product = block.coefficients(streams).skip @ product
        streams = block(streams)
    return torch.linalg.svdvals(product)


def _compare_with_theory(model: nn.Module, connections: list[jpmhc.HyperConnection], x: Tensor) -> Spectra:
    """Return quantiles of the singular values of the model's Jacobian at one example `x`, measured and predicted."""
    stack: nn.Module = jpmhc.HyperConnectionStack(connections) if connections else model
    streams = jpmhc.expand_streams(x, connections[0].streams) if connections else x
    diagnosis = jpmhc.diagnose(stack, streams.unsqueeze(0), method="dense", tokens=1, say=None)
    own = diagnosis.comparisons[0].model_map
    assert own is not None  # a dense measurement includes it
    measured, predicted, with_modes = (
        np.array([float("nan") if curve is None else curve.quantile(share) for share in SHARES])
        for curve in (own.measured, own.predicted, own.rotated)
    )
    return Spectra(measured, predicted, with_modes, own.kolmogorov, own.rotated_kolmogorov)
