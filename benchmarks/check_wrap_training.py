"""A tiny GPT-2, wrapped in the middle of its training, beside the plain one: same data, saved, loaded and resumed.

    python benchmarks/check_wrap_training.py [--mixers cayley sinkhorn] [--steps 200] [--write]

A byte-level GPT-2 (four layers, d = 64) learns this package's own source for `--steps` steps. Then copies of it go on
for as many: plain, and wrapped with each mixer. Half-way a wrapped model is saved, loaded and resumed, which must give
the same weights as going on. `--write` puts the table into docs/results/wrap.md.
"""

import argparse
import copy
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

import jpmhc
from harness import write_table
from jpmhc.wrap.comparison import relative_difference

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs/results/wrap.md"
BATCH, LENGTH, RATE = 16, 128, 1e-3


def read_bytes() -> Tensor:
    """The package's source as one row of bytes."""
    text = b"".join(path.read_bytes() for path in sorted((ROOT / "src").rglob("*.py")))
    return torch.frombuffer(bytearray(text), dtype=torch.uint8).long()


def batch(data: Tensor, step: int) -> Tensor:
    """The sequences of one step, the same for every model; negative steps are from the held-out tenth."""
    split = len(data) * 9 // 10
    first, last = (0, split) if step >= 0 else (split, len(data))
    starts = torch.randint(first, last - LENGTH, (BATCH,), generator=torch.Generator().manual_seed(step + 1000))
    return torch.stack([data[start : start + LENGTH] for start in starts])


def optimizer_of(model: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(jpmhc.parameter_groups(model, weight_decay=0.1), lr=RATE)


def train(model: Any, optimizer: torch.optim.Optimizer, data: Tensor, steps: range) -> None:
    model.train()
    for step in steps:
        tokens = batch(data, step)
        model(tokens, labels=tokens).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()


@torch.no_grad()
def held_out_loss(model: Any, data: Tensor) -> float:
    model.eval()
    losses = [model(tokens, labels=tokens).loss for tokens in (batch(data, -k) for k in range(1, 21))]
    return float(torch.stack(losses).mean())


def largest_difference(one: Any, other: Any) -> float:
    """The largest difference of two models' weights, each relative to its largest."""
    pairs = [(value, other.state_dict()[key]) for key, value in one.state_dict().items() if value.is_floating_point()]
    return max(relative_difference(a, b) for a, b in pairs)


def resume(model: Any, optimizer: torch.optim.Optimizer) -> tuple[Any, torch.optim.Optimizer]:
    """The same model and optimiser after they have been saved and loaded."""
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        torch.save(optimizer.state_dict(), f"{folder}/optimizer.pt")
        loaded = jpmhc.load_wrapped(transformers.AutoModelForCausalLM, folder)
        again = optimizer_of(loaded)
        again.load_state_dict(torch.load(f"{folder}/optimizer.pt"))
    return loaded, again


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mixers", nargs="+", default=["cayley", "sinkhorn"], choices=list(jpmhc.MIXERS))
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--write", action="store_true", help=f"write the table of {PAGE}")
    options = parser.parse_args()
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    data, steps = read_bytes(), options.steps
    torch.manual_seed(0)
    sizes = {"vocab_size": 256, "n_embd": 64, "n_layer": 4, "n_head": 4, "n_positions": LENGTH}
    dropouts = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    config = transformers.GPT2Config(**sizes, **dropouts, bos_token_id=0, eos_token_id=0, loss_type="ForCausalLM")
    start = transformers.GPT2LMHeadModel(config)
    train(start, optimizer_of(start), data, range(steps))
    rows = [("before", held_out_loss(start, data), None)]
    for name in ("plain", *options.mixers):
        model = copy.deepcopy(start)
        if name != "plain":
            jpmhc.wrap(model, mixer=name)
            begin = held_out_loss(model, data)
            if abs(begin - rows[0][1]) > 1e-4:
                sys.exit(f"wrapping with {name} changed the loss from {rows[0][1]} to {begin}")
        optimizer = optimizer_of(model)
        train(model, optimizer, data, range(steps, steps + steps // 2))
        loaded = resume(model, optimizer) if name != "plain" else None
        train(model, optimizer, data, range(steps + steps // 2, 2 * steps))
        difference = None
        if loaded is not None:
            train(*loaded, data, range(steps + steps // 2, 2 * steps))
            difference = largest_difference(model, loaded[0])
        rows.append((name, held_out_loss(model, data), difference))
        print(rows[-1], flush=True)
    lines = ["| model | loss | resumed |", "|---|---|---|"]
    lines += [f"| {name} | {loss:.4f} | {'' if gap is None else f'{gap:.0e}'} |" for name, loss, gap in rows]
    print("\n".join(lines))
    if options.write:
        write_table(PAGE, "training", lines)
    if any(gap is not None and gap > 1e-3 for *_, gap in rows):
        sys.exit("a resumed model is not the one that went on")


if __name__ == "__main__":
    main()
