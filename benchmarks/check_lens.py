"""Does the lens for streams read the token that the model will say? Against the logit lens, at every layer.

A decoder with four streams is trained on text; the lenses come from 60 held-out rows, the accuracy from 200 others:
the share of tokens at which the lens's most likely next token is the one that the model itself finds most likely.

    python benchmarks/check_lens.py

takes two minutes on one core and writes benchmarks/results/lens.csv.
"""

import argparse

import torch
from torch import Tensor

import jpmhc
from harness import write_csv
from jpmhc.diagnose import lens
from jpmhc.experiments.models.decoder import Decoder, DecoderConfig
from jpmhc.experiments.models.layers import rms_norm
from jpmhc.experiments.tasks.language import cut_rows, draw_rows, prepare_tokens, read_tokens

LENGTH, BATCH, PROMPTS, TESTS, RANK = 16, 32, 60, 200, 8


def train_decoder(mixer: str, steps: int) -> tuple[Decoder, Tensor]:
    """Return a trained decoder and held-out rows of tokens."""
    text = read_tokens(prepare_tokens(vocabulary=512, limit=2_000_000))
    torch.manual_seed(0)
    model = Decoder(
        DecoderConfig(
            dim=64, layers=6, heads=4, length=LENGTH, vocabulary=text.manifest.vocabulary, streams=4, mixer=mixer
        )
    )
    optimiser = torch.optim.AdamW(jpmhc.parameter_groups(model, 0.1), 3e-3, (0.9, 0.95))
    starts = draw_rows(text.count_rows(LENGTH), steps * BATCH, LENGTH, 0).view(steps, BATCH)
    for step in range(steps):
        optimiser.param_groups[0]["lr"] = 3e-3 * min(1, (step + 1) / 30)
        optimiser.zero_grad()
        loss = model(*cut_rows(text.training, starts[step], LENGTH))
        loss.backward()
        optimiser.step()
    held_out, _ = cut_rows(text.validation, text.validation_rows(PROMPTS + TESTS, LENGTH), LENGTH)
    print(f"{mixer}: loss {float(loss.detach()):.3f} after {steps} steps", flush=True)
    return model, torch.nn.functional.embedding(held_out, model.tokens).detach()


def main() -> None:
    """Print and save the accuracy at every layer."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mixers", nargs="*", default=["cayley", "sinkhorn"], help="the mixers to train")
    parser.add_argument("--steps", type=int, default=300, help="training steps")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for mixer in options.mixers:
        model, x = train_decoder(mixer, options.steps)
        prompts, tests = list(x[:PROMPTS].split(20)), x[PROMPTS:]
        with torch.no_grad():
            spoken = model.head(rms_norm(model.network(tests))).argmax(-1)
        for layer in range(1, len(model.network) - 1, 2):
            full = lens(model.network, layer, prompts, say=None)
            few = lens(model.network, layer, prompts, rank=RANK, say=None)
            fitted = lens(model.network, layer, prompts, fit=True, say=None)
            n = full.matrix.shape[1]
            identity = torch.eye(full.matrix.shape[0])[:, None].expand(-1, n, -1) / n
            logit = type(full)(full.layer, identity, torch.zeros_like(full.offset), 0)
            row = {"mixer": mixer, "layer": layer + 1}
            for name, one in (
                ("logit lens", logit),
                ("lens", full),
                (f"lens of rank {RANK}", few),
                ("fitted lens", fitted),
            ):
                with torch.no_grad():
                    said = model.head(rms_norm(one.read(model.network, tests))).argmax(-1)
                row[name] = float((said == spoken).double().mean())
            rows.append(row)
            print(
                {name: round(value, 3) if isinstance(value, float) else value for name, value in row.items()},
                flush=True,
            )
    write_csv("lens", rows)


if __name__ == "__main__":
    main()
