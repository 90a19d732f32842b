"""The demonstration: the same deep stack is trained with every mixer on the same generated task.

The task is a fixed random function. It is small enough for a minute on a laptop, and the stack is deep enough for the
mixers to differ in the gradients that reach its first layers.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

import jpmhc
from jpmhc import checks
from jpmhc.threads import one_thread


@dataclass(frozen=True)
class DemoConfig:
    """Size of the demonstration."""

    depth: int = 24
    """Layers of the stack."""
    dim: int = 32
    """Width of one stream."""
    streams: int = 4
    """Parallel residual streams."""
    steps: int = 120
    """Training steps of each mixer."""
    batch: int = 128
    """Examples a step."""
    learning_rate: float = 3e-3
    """Step size of AdamW."""
    seed: int = 0
    """Seed of task, weights and batches."""

    def __post_init__(self) -> None:
        for name in ("depth", "dim", "streams", "steps", "batch"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        checks.fits_memory(64 * self.depth * self.dim**2, f"training {self.depth} layers of width {self.dim}")


DEFAULT = DemoConfig()


@dataclass
class Outcome:
    """What training one mixer gave.

    Attributes:
        losses: Training loss of every step.
        gradients: Mean norm over the last steps of the gradient that arrives at each layer's weights. [depth]
        similarity: Mean cosine between the streams at the top: 1 means that they are still copies.
        violation: How far the worst skip matrix is from its set.
        product: Singular values of the product of all skip matrices, averaged over tokens. [streams]
    """

    mixer: str
    losses: list[float] = field(default_factory=list)
    gradients: list[float] = field(default_factory=list)
    similarity: float = 0.0
    violation: float = 0.0
    product: list[float] = field(default_factory=list)


def train_every_mixer(
    config: DemoConfig, report: Callable[[str, int], None] = lambda mixer, step: None
) -> Iterator[Outcome]:
    """Train the stack once with each mixer, and yield what came of it.

    Args:
        config: Sizes.
        report: Called with the mixer's name and the step after every step.
    """
    for mixer in possible_mixers(config):
        with one_thread():
            outcome = _train_mixer(mixer, config, report)
        yield outcome


def possible_mixers(config: DemoConfig) -> list[str]:
    """Return the names of the mixers that can take this number of streams."""
    return [name for name, mixer in jpmhc.MIXERS.items() if mixer.why_not(config.streams) is None]


def _make_layer(dim: int) -> nn.Module:
    return nn.Sequential(nn.RMSNorm(dim), nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))


def _make_task(config: DemoConfig) -> Callable[[Tensor], Tensor]:
    """Return the function to be learned, a fixed random network of two layers."""
    generator = torch.Generator().manual_seed(config.seed)
    first, second = (torch.randn(config.dim, config.dim, generator=generator) / config.dim**0.5 for _ in range(2))
    return lambda x: 2 * torch.tanh(2 * x @ first) @ second


def _train_mixer(mixer: str, config: DemoConfig, report: Callable[[str, int], None]) -> Outcome:
    torch.manual_seed(config.seed)
    layers = [_make_layer(config.dim) for _ in range(config.depth)]
    model = jpmhc.HyperConnectionStack(
        jpmhc.HyperConnection(layer, config.dim, config.streams, mixer, index=k) for k, layer in enumerate(layers)
    )
    optimizer = torch.optim.AdamW(jpmhc.parameter_groups(model, 0.01), lr=config.learning_rate)
    task, outcome = _make_task(config), Outcome(mixer)
    generator = torch.Generator().manual_seed(config.seed + 1)
    totals = torch.zeros(config.depth)
    tail = min(20, config.steps)
    for step in range(1, config.steps + 1):
        x = torch.randn(config.batch, config.dim, generator=generator)
        out = jpmhc.reduce_streams(model(jpmhc.expand_streams(x, config.streams)))
        loss = (out - task(x)).square().mean()
        if not bool(loss.isfinite()):
            rate = config.learning_rate
            raise ValueError(
                f"training with the {mixer} mixer diverged at step {step}: lower the learning rate {rate:g}"
            )
        optimizer.zero_grad()
        loss.backward()
        if step > config.steps - tail:
            totals += torch.stack([_gradient_norm(layer) for layer in layers])
        optimizer.step()
        outcome.losses.append(loss.item())
        report(mixer, step)
    outcome.gradients = (totals / tail).tolist()
    with torch.no_grad():
        _measure_stack(model, jpmhc.expand_streams(x, config.streams), outcome)
    return outcome


def _gradient_norm(layer: nn.Module) -> Tensor:
    return torch.stack([p.grad.norm() for p in layer.parameters() if p.grad is not None]).norm()


def _measure_stack(model: jpmhc.HyperConnectionStack, x: Tensor, outcome: Outcome) -> None:
    """Run the stack once more and record its skip matrices and how alike its streams are."""
    product = torch.eye(x.shape[-2]).expand(len(x), -1, -1)
    for block in model.connections:
        assert isinstance(block, jpmhc.HyperConnection)
        skip = block.coefficients(x).skip
        outcome.violation = max(outcome.violation, block.mixer.violation(skip).max().item())
        product = skip @ product
        x = block(x)
    outcome.product = torch.linalg.svdvals(product).mean(0).tolist()
    unit = nn.functional.normalize(x, dim=-1)
    n = x.shape[-2]
    cosines = (unit @ unit.mT).sum((-2, -1)) - n
    outcome.similarity = (cosines / max(n * (n - 1), 1)).mean().item()
