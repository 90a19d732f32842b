"""Theory beside networks that are trained: J of all streams and T, the model's own map, along training.

A small decoder of text and the recursive model on 4 × 4 Sudoku are trained with plain residuals, with several
mixers, and with skips that average all streams in every layer; `jpmhc.diagnose` measures them at the start, in the
middle and at the end. The theory gets the coefficients of the token and the singular values of its sublayers alone.

    python benchmarks/check_trained.py

takes about ten minutes on two cores and writes benchmarks/results/trained.csv and docs/results/trained.png.
"""

import argparse
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch
from matplotlib.figure import Figure
from torch import Tensor, nn

import jpmhc
from harness import write_csv
from jpmhc.diagnose import Diagnosis, Spectrum
from jpmhc.diagnose.compare import TheoryComparison
from jpmhc.experiments.comparison.experiment import PLAIN, configure_mixer
from jpmhc.experiments.models import RecursiveConfig, RecursiveModel
from jpmhc.experiments.models.decoder import Decoder, DecoderConfig
from jpmhc.experiments.models.losses import row_losses
from jpmhc.experiments.tasks.language import cut_rows, draw_rows, prepare_tokens, read_tokens
from jpmhc.experiments.tasks.registry import TASKS
from jpmhc.mixers.identity import Identity
from jpmhc.report.style import INK, colour_of, finish_axes
from jpmhc.spectra import Density

AVERAGING = "averaging"
MIXERS = (PLAIN, "identity", "unconstrained", "sinkhorn", "cayley", "rotation", "grassmann", AVERAGING)
RECURSIVE_MIXERS = (PLAIN, "sinkhorn", "cayley", "rotation", AVERAGING)
STEPS = {"decoder": 300, "recursive": 150}
BATCH, TOKENS, SEED = 32, 2, 0
FIGURE = Path(__file__).parent.parent / "docs" / "results" / "trained.png"


class Averaging(Identity):
    """H = 11ᵀ/n: every layer forgets all differences between streams, and the model's own map does not feel it."""

    name = AVERAGING

    def forward(self, logits: Tensor) -> Tensor:
        return torch.full_like(super().forward(logits), 1 / self.streams)

    def violation(self, matrix: Tensor) -> Tensor:
        return (matrix - 1 / self.streams).abs().amax((-2, -1))


def train_decoder(mixer: str) -> Iterator[tuple[int, float, nn.Module, Tensor]]:
    """Train the decoder; yield step, validation loss, the network and its input at the start, middle and end."""
    text, length, steps = read_tokens(prepare_tokens(vocabulary=512, limit=2_000_000)), 16, STEPS["decoder"]
    size = DecoderConfig(dim=64, layers=4, heads=4, length=length, vocabulary=text.manifest.vocabulary, streams=4)
    config = configure_mixer(size, mixer)
    torch.manual_seed(SEED)
    model = Decoder(config)
    optimiser = torch.optim.AdamW(jpmhc.parameter_groups(model, 0.1), 3e-3, (0.9, 0.95))
    starts = draw_rows(text.count_rows(length), steps * BATCH, length, SEED).view(steps, BATCH)
    held_out = cut_rows(text.validation, text.validation_rows(128, length), length)

    def loss_of(step: int) -> Tensor:
        return model(*cut_rows(text.training, starts[step], length))

    for done in _train(loss_of, optimiser, steps):
        with torch.no_grad():
            loss = float(model(*held_out))
            x = torch.nn.functional.embedding(held_out[0][:1], model.tokens)
        yield done, loss, model.network, x if config.plain else x.unsqueeze(-2)


def train_recursive(mixer: str) -> Iterator[tuple[int, float, nn.Module, Tensor]]:
    """Train the recursive model; yield step, test loss, its network and what a call of it is given."""
    sizes = {"dim": 64, "heads": 4, "inner_multiple": 64, "puzzle_slots": 1, "h_cycles": 2, "l_cycles": 2}
    config = configure_mixer(RecursiveConfig(**sizes, streams=4), mixer)
    task = TASKS["sudoku"]().build()
    torch.manual_seed(SEED)
    model = RecursiveModel(config, task.vocabulary, task.length, task.identifier_count)
    core, steps = model.core, STEPS["recursive"]
    optimiser = torch.optim.AdamW(jpmhc.parameter_groups(core, 0.1), 2e-3, (0.9, 0.95))

    def run(batch: object, rows: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return the mean loss over two supervision steps, and the states after them."""
        states, total = core.initial_states(rows), 0.0
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
        yield done, float(loss), core.network, x if config.plain else x.unsqueeze(-2)


def _train(loss_of: Callable[[int], Tensor], optimiser: torch.optim.Optimizer, steps: int) -> Iterator[int]:
    """Take the steps; yield how many are done at the start, in the middle and at the end."""
    yield 0
    for step in range(steps):
        for group in optimiser.param_groups:
            group["lr"] *= min(1, (step + 1) / 30) / min(1, max(step, 1) / 30) if step else 1 / 30
        loss_of(step).backward()
        optimiser.step()
        optimiser.zero_grad()
        if step + 1 in (steps // 4, steps):
            yield step + 1


def list_pairs(item: TheoryComparison) -> dict[str, tuple[Spectrum, Density]]:
    """Return the measured spectrum and the theory's of J and of T; for one stream T is J."""
    streams = item.measured, item.predicted
    return {"j": streams, "t": streams if item.mean_stream is None else (item.mean_stream, item.mean_predicted)}


def describe(found: Diagnosis) -> dict[str, float]:
    """Return the numbers of a diagnosis, means over its tokens."""
    tokens = []
    for item in found.comparisons:
        numbers = {"aligned": item.aligned, "j_ks": item.kolmogorov, "j_w1": item.wasserstein}
        numbers["t_ks"] = item.kolmogorov if item.mean_stream is None else item.mean_kolmogorov
        for name, (measured, theory) in list_pairs(item).items():
            numbers |= {f"{name}_below": measured.below(), f"{name}_below_theory": theory.collapsed()}
            for place in (0.5, 0.99):
                numbers |= {
                    f"{name}_{place}": measured.quantile(place),
                    f"{name}_{place}_theory": theory.quantile(place),
                }
        tokens.append(numbers)
    return {name: float(np.mean([numbers[name] for numbers in tokens])) for name in tokens[0]}


def draw_case(axes: tuple, found: list[Diagnosis], mixer: str) -> None:
    """Draw the shares below each singular value of J (above) and T (below): start, middle and end."""
    for one, shade in zip(found, (0.3, 0.6, 1.0)):
        for place, (measured, theory) in zip(axes, list_pairs(one.comparisons[-1]).values()):
            values = np.sort(measured.squares().sqrt().numpy())
            shares = np.arange(1, len(values) + 1) / len(values)
            place.plot(values, shares, color=colour_of(mixer), lw=2.4, alpha=shade)
            place.plot(theory.x.sqrt().numpy(), theory.cumulative().numpy(), color=INK, lw=0.8, ls="--", alpha=shade)
    for place in axes:
        place.axvline(0.1, color=INK, lw=0.6, ls=":")
        place.set(xscale="log", xlim=(1e-3, 30), ylim=(0, 1.02))
        finish_axes(place)
    axes[0].set_title(mixer, fontsize=10)


def main() -> None:
    """Train and measure everything; print a line for each measurement."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mixers", nargs="*", default=list(MIXERS), help="some of the mixers, to see that it works")
    chosen = parser.parse_args().mixers
    torch.set_num_threads(1)  # matrices are small, and threads that wait for each other spin
    jpmhc.MIXERS[AVERAGING] = Averaging
    figure = Figure(figsize=(2.1 * len(MIXERS), 8.4), layout="constrained")
    panels = figure.subplots(4, len(MIXERS), sharex=True, sharey=True, squeeze=False)
    rows = []
    for begin, (model, train, mixers) in zip(
        (0, 2), (("decoder", train_decoder, MIXERS), ("recursive", train_recursive, RECURSIVE_MIXERS))
    ):
        for column, mixer in enumerate(MIXERS):
            if mixer not in mixers or mixer not in chosen:
                panels[begin][column].set_axis_off()
                panels[begin + 1][column].set_axis_off()
                continue
            found, clock = [], time.perf_counter()
            for step, loss, network, x in train(mixer):
                found.append(jpmhc.diagnose(network, x, tokens=TOKENS, seconds=600, say=None))
                rows.append({"model": model, "mixer": mixer, "step": step, "loss": loss, **describe(found[-1])})
                row = rows[-1]
                print(
                    f"{model} {mixer} step {step}: loss {loss:.3f}; J below 0.1 {row['j_below']:.1%} (theory "
                    f"{row['j_below_theory']:.1%}), KS {row['j_ks']:.3f}; T below 0.1 {row['t_below']:.1%}, KS "
                    f"{row['t_ks']:.3f}; aligned {row['aligned']:.2f}; {time.perf_counter() - clock:.0f} s",
                    flush=True,
                )
            draw_case((panels[begin][column], panels[begin + 1][column]), found, mixer)
    for panel, name in zip(panels[:, 0], ("decoder, J", "decoder, T", "recursive, J", "recursive, T")):
        panel.set_ylabel(f"{name}: share below", fontsize=9)
    for column in panels.T:
        lowest = column[-1] if column[-1].axison else column[1]
        lowest.set_xlabel("singular value", fontsize=9)
        lowest.tick_params(labelbottom=True)
    figure.savefig(FIGURE, dpi=75)
    print(f"wrote {FIGURE}")
    write_csv("trained", rows)


if __name__ == "__main__":
    main()
