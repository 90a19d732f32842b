"""Theory beside networks that are trained: with free layers, and with the modes that trained layers share.

Each network is trained for a minute and measured by `jpmhc.diagnose` at the start, after a quarter and at the end.
The theory gets the coefficients of the token and the Jacobians of its sublayers at the token, and nothing is fitted.

    python benchmarks/check_trained.py

takes about fifteen minutes on one core and writes benchmarks/results/trained.csv and docs/results/trained.png.
`--networks decoder-cayley llama-cayley` measures some of them and keeps the other rows of the file.
"""

import argparse
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure
from torch import Tensor, nn

import jpmhc
from harness import read_csv, write_csv
from jpmhc.diagnose import Diagnosis
from jpmhc.experiments.comparison.experiment import PLAIN, configure_mixer
from jpmhc.experiments.comparison.language import PRESETS, LanguageExperiment
from jpmhc.experiments.demo import make_layer, make_model
from jpmhc.experiments.models.decoder import Decoder, DecoderConfig
from jpmhc.experiments.models.losses import row_losses
from jpmhc.experiments.models.recursive import RecursiveConfig, RecursiveModel
from jpmhc.experiments.tasks import TASKS
from jpmhc.experiments.tasks.language import cut_rows, draw_rows, prepare_tokens, read_tokens
from jpmhc.mixers.identity import Identity
from jpmhc.report.style import COMPARED, INK, finish_axes

AVERAGING = "averaging"
BATCH, LENGTH, TOKENS, SEED = 32, 16, 1, 0
FIGURE = Path(__file__).parent.parent / "docs" / "results" / "trained.png"


class Averaging(Identity):
    """H = 11ᵀ/n: every layer forgets all differences between streams, and the model's own map does not feel it."""

    name = AVERAGING

    def forward(self, logits: Tensor) -> Tensor:
        return torch.full_like(super().forward(logits), 1 / self.streams)

    def violation(self, matrix: Tensor) -> Tensor:
        return (matrix - 1 / self.streams).abs().amax((-2, -1))


@dataclass
class Stage:
    """A network at one moment of its training."""

    step: int  # training steps done
    loss: float  # on held-out examples
    network: nn.Module
    inputs: Any
    between: tuple[str | None, str | None] | None = None  # ends of the map


def train_mlp(mixer: str, dim: int, depth: int, rate: float = 2e-3, steps: int = 80) -> Iterator[Stage]:
    """Train a pre-norm MLP stack on a fixed random function, the demonstration's task."""
    torch.manual_seed(SEED)
    model, _ = make_model(mixer, [make_layer(dim) for _ in range(depth)], dim, 4)
    generator = torch.Generator().manual_seed(SEED)
    first, second = (torch.randn(dim, dim, generator=generator) / dim**0.5 for _ in range(2))
    held_out = torch.randn(1024, dim, generator=generator)

    def target(x: Tensor) -> Tensor:
        return 2 * torch.tanh(2 * x @ first) @ second

    def loss_of(step: int) -> Tensor:
        x = torch.randn(64, dim, generator=generator)
        return (model(x) - target(x)).square().mean()

    optimiser = torch.optim.AdamW(jpmhc.parameter_groups(model, 0.01), rate)
    for done in _train(loss_of, optimiser, steps, lambda step: 1.0):
        with torch.no_grad():
            loss = float((model(held_out) - target(held_out)).square().mean() / target(held_out).var())
        yield Stage(done, loss, model, held_out[:2].unsqueeze(0))


@cache
def find_text() -> Path:
    """Return the folder with the tokens of Python's standard library."""
    return prepare_tokens(vocabulary=512, limit=2_000_000)


@cache
def load_text() -> Any:
    """Return the tokens of Python's standard library."""
    return read_tokens(find_text())


def train_decoder(mixer: str, steps: int = 300) -> Iterator[Stage]:
    """Train the decoder on short rows of text."""
    model = DecoderConfig(dim=64, layers=4, heads=4, length=LENGTH, streams=4)
    settings = replace(PRESETS["tiny"], model=model, batch=BATCH, steps=steps, warmup=30)
    yield from train_language(settings, mixer, 3e-3)


def train_language(settings: LanguageExperiment, arm: str, rate: float) -> Iterator[Stage]:
    """Train the decoder of `jpmhc compare language` on text."""
    text = load_text()
    settings = replace(settings, tokens=find_text()).configure(arm)
    length, batch = settings.model.length, settings.batch
    torch.manual_seed(SEED)
    model = Decoder(settings.model)
    (optimiser,) = settings.make_optimizers(model, rate)
    starts = draw_rows(text.count_rows(length), settings.steps * batch, length, SEED).view(settings.steps, batch)
    held_out = cut_rows(text.validation, text.validation_rows(128, length), length)

    def loss_of(step: int) -> Tensor:
        return model(*cut_rows(text.training, starts[step], length))

    for done in _train(loss_of, optimiser, settings.steps, settings.rate_factor):
        with torch.no_grad():
            loss = float(model(*held_out))
            x = torch.nn.functional.embedding(held_out[0][:1], model.tokens)
        yield Stage(done, loss, model.network, x)


def train_llama(mixer: str, steps: int = 200) -> Iterator[Stage]:
    """Train a Llama of `transformers` on text, with its additions wrapped into connections."""
    import transformers

    text = load_text()
    torch.manual_seed(SEED)
    config = transformers.LlamaConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        vocab_size=text.manifest.vocabulary,
        pad_token_id=None,
        bos_token_id=None,
        eos_token_id=None,
    )
    model = transformers.LlamaForCausalLM(config)
    held_out = cut_rows(text.validation, text.validation_rows(128, LENGTH), LENGTH)
    if mixer != PLAIN:
        jpmhc.wrap(model, streams=4, mixer=mixer, inputs={"input_ids": held_out[0][:2]})
    optimiser = torch.optim.AdamW(jpmhc.parameter_groups(model, 0.1), 3e-3, (0.9, 0.95))
    starts = draw_rows(text.count_rows(LENGTH), steps * BATCH, LENGTH, SEED).view(steps, BATCH)

    def loss_of(inputs: Tensor, labels: Tensor) -> Tensor:
        logits = model(input_ids=inputs).logits
        return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())

    for done in _train(lambda step: loss_of(*cut_rows(text.training, starts[step], LENGTH)), optimiser, steps):
        with torch.no_grad():
            loss = float(loss_of(*held_out))
        yield Stage(done, loss, model, {"input_ids": held_out[0][:1]}, (None, "model.norm"))


def train_recursive(mixer: str, steps: int = 150) -> Iterator[Stage]:
    """Train the recursive model on 4 × 4 Sudoku; one call of its network is measured."""
    sizes = {"dim": 64, "heads": 4, "inner_multiple": 64, "puzzle_slots": 1, "h_cycles": 2, "l_cycles": 2}
    config = configure_mixer(RecursiveConfig(**sizes, streams=4), mixer)
    task = TASKS["sudoku"]().build()
    torch.manual_seed(SEED)
    model = RecursiveModel(config, task.vocabulary, task.length, task.identifier_count)
    core = model.core
    optimiser = torch.optim.AdamW(jpmhc.parameter_groups(core, 0.1), 2e-3, (0.9, 0.95))

    def run(batch: Any, rows: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return the mean loss over two supervision steps, and the states after them."""
        states, total = core.initial_states(rows), torch.zeros(())
        for _ in range(2):
            *states, answer = core.run_supervision_step(model.puzzles(batch.identifiers), batch.inputs, *states)
            total = total + row_losses(answer.logits, batch.labels, answer.q_halt).language.mean() / 2
        return total, *states

    def loss_of(step: int) -> Tensor:
        return run(task.examples(np.arange(step * BATCH, (step + 1) * BATCH)), BATCH)[0]

    test = task.test_examples(np.arange(64))
    for done in _train(loss_of, optimiser, steps):
        with torch.no_grad():
            loss, z_h, z_l = run(test, 64)
            x = (z_l + z_h + core.embed_rows(model.puzzles(test.identifiers), test.inputs))[:1]
        yield Stage(done, float(loss), core.network, x if config.plain else x.unsqueeze(-2))


def _train(
    loss_of: Callable[[int], Tensor],
    optimiser: torch.optim.Optimizer,
    steps: int,
    factor: Callable[[int], float] = lambda step: min(1, (step + 1) / 30),
) -> Iterator[int]:
    """Take the steps; yield how many are done at the start, after a quarter and at the end.

    `loss_of` computes the loss of one step. `factor` is the learning rate's at a step; by default it rises in 30 steps.
    """
    yield 0
    rates = [group["lr"] for group in optimiser.param_groups]
    for step in range(steps):
        for group, rate in zip(optimiser.param_groups, rates):
            group["lr"] = rate * factor(step)
        optimiser.zero_grad()
        loss_of(step).backward()
        optimiser.step()
        if step + 1 in (steps // 4, steps):
            yield step + 1


NETWORKS: dict[str, Callable[[], Iterator[Stage]]] = {
    "mlp-48-plain": partial(train_mlp, PLAIN, 32, 48),
    "mlp-12-plain": partial(train_mlp, PLAIN, 64, 12),
    "mlp-24-plain": partial(train_mlp, PLAIN, 96, 24),
    "mlp-24-rotation": partial(train_mlp, "rotation", 64, 24),
    "mlp-24-cayley": partial(train_mlp, "cayley", 64, 24),
    "mlp-24-sinkhorn": partial(train_mlp, "sinkhorn", 64, 24),
    "mlp-24-unconstrained": partial(train_mlp, "unconstrained", 64, 24),
    "decoder-plain": partial(train_decoder, PLAIN),
    "decoder-rotation": partial(train_decoder, "rotation"),
    "decoder-cayley": partial(train_decoder, "cayley"),
    "decoder-sinkhorn": partial(train_decoder, "sinkhorn"),
    "decoder-averaging": partial(train_decoder, AVERAGING),
    "llama-plain": partial(train_llama, PLAIN),
    "llama-cayley": partial(train_llama, "cayley"),
    "recursive-plain": partial(train_recursive, PLAIN),
    "recursive-rotation": partial(train_recursive, "rotation"),
    "recursive-cayley": partial(train_recursive, "cayley"),
    "recursive-sinkhorn": partial(train_recursive, "sinkhorn"),
    "recursive-unconstrained": partial(train_recursive, "unconstrained"),
}


def describe(diagnosis: Diagnosis) -> dict[str, float]:
    """Return the numbers of a diagnosis, means over its tokens."""
    tokens = []
    for item in diagnosis.comparisons:
        own = item.model_map
        numbers: dict[str, float] = {
            "modes": item.modes.count,
            "outlier": float(item.modes.eigenvalues[0]),
            "limit": item.modes.limit,
            "share": item.modes.share,
            "aligned": item.aligned,
            "j_ks_free": item.kolmogorov,
            "j_ks_modes": item.rotated_kolmogorov,
            "t_ks_free": own.kolmogorov,
            "t_ks_modes": own.rotated_kolmogorov,
            "j_below": item.measured.below(),
            "j_below_free": item.predicted.collapsed(),
            "j_below_modes": item.rotated.below(),
            "t_below": own.measured.below(),
            "t_below_free": own.predicted.collapsed(),
            "t_below_modes": own.rotated.below(),
            "t_99": own.measured.quantile(0.99),
            "t_99_free": own.predicted.quantile(0.99),
            "t_99_modes": own.rotated.quantile(0.99),
        }
        tokens.append(numbers)
    return {name: float(np.mean([numbers[name] for numbers in tokens])) for name in tokens[0]}


def draw_panel(ax: Any, name: str, diagnosis: Diagnosis) -> None:
    """Draw the shares below each singular value of T: measured, predicted with free layers, and with modes."""
    own = diagnosis.comparisons[-1].model_map
    free = own.predicted
    for spectrum, colour, width in ((own.measured, COMPARED[0], 2.6), (own.rotated, COMPARED[1], 1.4)):
        values, shares = spectrum.cumulative()
        ax.plot(values, shares, color=colour, lw=width)
    ax.plot(free.x.sqrt().numpy(), free.cumulative().numpy(), color=INK, lw=1, ls="--")
    ax.axvline(0.1, color=INK, lw=0.6, ls=":")
    ax.set(xscale="log", xlim=(1e-2, 30), ylim=(0, 1.02))
    ax.set_title(f"{name}: KS {own.kolmogorov:.2f} free, {own.rotated_kolmogorov:.2f} with modes", fontsize=8)
    finish_axes(ax)


def measure_networks(names: list[str]) -> None:
    """Train and measure the networks; print a line for each measurement."""
    rows, last = [], {}
    for name in names:
        clock = time.perf_counter()
        for stage in NETWORKS[name]():
            training = stage.network.training
            diagnosis = jpmhc.diagnose(
                stage.network.eval(), stage.inputs, stage.between, tokens=TOKENS, seconds=600, say=None
            )
            stage.network.train(training)
            row = {"network": name, "step": stage.step, "loss": stage.loss, **describe(diagnosis)}
            rows.append(row)
            last[name] = diagnosis
            print(
                f"{name} step {stage.step}: loss {stage.loss:.3f}; {row['modes']:.1f} modes, largest "
                f"{row['outlier']:.2f}, share {row['share']:.0%}; T: KS {row['t_ks_free']:.3f} free, "
                f"{row['t_ks_modes']:.3f} with modes; J: {row['j_ks_free']:.3f}, {row['j_ks_modes']:.3f}; "
                f"{time.perf_counter() - clock:.0f} s",
                flush=True,
            )
    kept = [row for row in read_csv("trained") if row["network"] in NETWORKS and row["network"] not in names]
    write_csv("trained", sorted([*kept, *rows], key=lambda row: list(NETWORKS).index(str(row["network"]))))
    if set(names) == set(NETWORKS):
        draw_all(last)


def draw_all(last: dict[str, Diagnosis]) -> None:
    """Draw the trained networks' own maps into one figure."""
    columns = 4
    figure = Figure(figsize=(3.1 * columns, 2.5 * math.ceil(len(last) / columns)), layout="constrained")
    axes = figure.subplots(math.ceil(len(last) / columns), columns, sharex=True, sharey=True, squeeze=False).ravel()
    for ax, (name, diagnosis) in zip(axes, last.items()):
        draw_panel(ax, name, diagnosis)
    for ax in axes[len(last) :]:
        ax.set_axis_off()
    figure.supxlabel("singular value of the model's own map T", fontsize=9)
    figure.supylabel("share below", fontsize=9)
    figure.savefig(FIGURE, dpi=75)
    print(f"wrote {FIGURE}")


def main() -> None:
    """Read the command's options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--networks", nargs="*", choices=NETWORKS, default=list(NETWORKS), help="some of the networks")
    options = parser.parse_args()
    torch.set_num_threads(1)  # matrices are small, and threads that wait for each other spin
    jpmhc.MIXERS[AVERAGING] = Averaging
    measure_networks(options.networks)


if __name__ == "__main__":
    main()
