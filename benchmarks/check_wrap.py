"""Every architecture of the installed `transformers` that can be built tiny, wrapped: one table.

    python benchmarks/check_wrap.py [--kinds causal masked ...] [--only llama gpt2] [--rows out/wrap.jsonl] [--write]

For each: wrapped, refused (and why) or wrong; how far the outputs differ; whether `generate` gives the same tokens; and
how far the streams are apart after ten steps of training, relative to the largest number in them. `--write` writes
benchmarks/results/wrap.csv and the counts of docs/results/wrap.md. `--rows` names a file that keeps finished rows for
the next run. Exits non-zero if any is wrong.
"""

import argparse
import copy
import dataclasses
import gc
import json
import sys
import warnings
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn

import jpmhc
from harness import write_csv, write_table
from jpmhc.wrap.comparison import default_inputs, floating_tensors, relative_difference
from jpmhc.wrap.layers import wrapped_layers
from tiny_models import FAILURES, KINDS, architectures, build

PAGE = Path(__file__).parents[1] / "docs/results/wrap.md"
EQUAL = 1e-4  # of the largest output; ten times what rounding gave in the worst case
APART = 1e-4  # a hundred times what rounding gives


@dataclass
class Row:
    """What happened to one architecture."""

    kind: str
    name: str
    result: str
    said: str = ""
    shape: str = ""
    difference: float | None = None
    generated: bool | None = None
    spread: float | None = None


def check(kind: str, name: str, model: nn.Module) -> Row:
    """Wrap one model, and compare it with what it was."""
    inputs = default_inputs(model)
    plain = copy.deepcopy(model)
    try:
        jpmhc.wrap(model, inputs=inputs)
    except ValueError as refusal:
        return Row(kind, name, "refused", str(refusal))
    plans = [held.plan for held in wrapped_layers(model).values()]
    row = Row(
        kind, name, "wrapped", shape=f"{len(plans)} / {sum(p.additions for p in plans)} / {sum(p.first for p in plans)}"
    )
    with torch.no_grad():
        pairs = zip(floating_tensors(plain(**inputs)), floating_tensors(model(**inputs)), strict=True)
        row.difference = max(relative_difference(old, new) for old, new in pairs)
    if kind in ("causal", "encoder-decoder"):
        row.generated = generates_alike(plain, model, inputs)
    row.spread = spread_after_training(plain, model, inputs)
    if not row.difference <= EQUAL or row.generated is False or (row.spread is not None and not row.spread > APART):
        row.result = "WRONG"
    return row


def generates_alike(plain: Any, model: Any, inputs: dict[str, Tensor]) -> bool | None:
    """Whether both choose the same tokens; None where the plain model cannot generate."""
    options: dict[str, Any] = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    if plain.config.is_encoder_decoder:
        options["decoder_start_token_id"] = 1
    try:
        chosen = plain.generate(inputs["input_ids"], **options)
    except FAILURES:
        return None
    return torch.equal(chosen, model.generate(inputs["input_ids"], **options))


def train(model: nn.Module, inputs: dict[str, Tensor], steps: int) -> None:
    """A few steps of AdamW towards arbitrary labels."""
    optimizer = torch.optim.AdamW(jpmhc.parameter_groups(model, weight_decay=0.0), lr=1e-2)
    for _ in range(steps):
        logits = floating_tensors(model.train()(**inputs))[0].flatten(0, -2)
        loss = nn.functional.cross_entropy(logits, torch.arange(len(logits)) % logits.shape[-1])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def spread_after_training(plain: nn.Module, model: nn.Module, inputs: dict[str, Tensor]) -> float | None:
    """The largest distance of a stream from the mean, after ten steps, relative to the largest number.

    None where the plain model cannot be trained so.
    """
    try:
        train(plain, inputs, 1)
    except FAILURES:
        return None
    seen: list[Tensor] = []
    held = list(wrapped_layers(model).values())[-1]

    last = held.additions[-1]
    write, write_mean = last.write, last.write_mean

    def look(x: Tensor, y: Tensor, state: Any) -> Tensor:
        seen[:] = [write(x, y, state).detach()]
        return write(x, y, state)

    def look_and_reduce(x: Tensor, y: Tensor, state: Any) -> Tensor:
        seen[:] = [write(x, y, state).detach()]
        return write_mean(x, y, state)

    last.write, last.write_mean = look, look_and_reduce
    train(model, inputs, 10)
    (x,) = seen
    return float((x - x.mean(-2, keepdim=True)).abs().max() / x.abs().max())


def rows(kinds: list[str], only: list[str], known: dict[tuple[str, str], Row]) -> Iterator[Row]:
    for kind in kinds:
        for name, config_class, model_class in architectures(kind):
            if only and name not in only:
                continue
            if (kind, name) in known:
                yield known[kind, name]
                continue
            try:
                model = build(config_class, model_class, lambda built: built(**default_inputs(built)))
            except FAILURES as problem:
                yield Row(kind, name, "not built", str(problem).splitlines()[0] if str(problem) else "")
                continue
            yield check(kind, name, model)
            del model
            gc.collect()


def summarise(found: list[Row]) -> list[str]:
    """Count what became of the architectures of each kind."""
    lines = ["| kind | wrapped | refused | wrong | could not be built tiny |", "|---|---|---|---|---|"]
    for kind in dict.fromkeys(row.kind for row in found):
        count = Counter(row.result for row in found if row.kind == kind)
        lines.append(f"| {kind} | {count['wrapped']} | {count['refused']} | {count['WRONG']} | {count['not built']} |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kinds", nargs="+", default=list(KINDS), choices=list(KINDS))
    parser.add_argument("--only", nargs="+", default=[], help="names of architectures")
    parser.add_argument("--rows", type=Path, help="a file that keeps what was found")
    parser.add_argument(
        "--write", action="store_true", help=f"write benchmarks/results/wrap.csv and the counts in {PAGE}"
    )
    options = parser.parse_args()
    transformers.logging.set_verbosity(transformers.logging.CRITICAL)
    warnings.simplefilter("ignore")
    found, known = [], {}
    if options.rows is not None and options.rows.exists():
        lines = [Row(**json.loads(line)) for line in options.rows.read_text().splitlines()]
        known = {(row.kind, row.name): row for row in lines}
    for row in rows(options.kinds, options.only, known):
        found.append(row)
        if options.rows is not None and row not in known.values():
            with options.rows.open("a") as file:
                file.write(json.dumps(dataclasses.asdict(row)) + "\n")
        print(
            row.kind,
            row.name,
            row.result,
            row.said or (row.shape, row.difference, row.generated, row.spread),
            flush=True,
        )
    print(Counter((row.kind, row.result) for row in found))
    if options.write:
        write_csv("wrap", [dataclasses.asdict(row) | {"transformers": transformers.__version__} for row in found])
        write_table(PAGE, "architectures", summarise(found))
    if any(row.result == "WRONG" for row in found):
        sys.exit("some are wrong")


if __name__ == "__main__":
    main()
