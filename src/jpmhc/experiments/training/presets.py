"""Named configurations with the defaults of training runs."""

import dataclasses
from pathlib import Path

from jpmhc.experiments.models.arc_decoder import ArcDecoderConfig
from jpmhc.experiments.models.recursive import RecursiveConfig
from jpmhc.experiments.tasks import TASKS
from jpmhc.experiments.tasks.arc import ArcConfig
from jpmhc.experiments.training.config import ArcDecoderRun, TrainConfig

# The public code: no clipping, no decay of the rate, plain residual connections.
_TRM = TrainConfig(
    preset="trm",
    task=TASKS["arc"](),
    model=RecursiveConfig(compute="bfloat16"),
    steps=518_000,
    compile=True,
    checkpoint_every=12_951,
    evaluate_every=12_951,
    log_every=100,
    out=Path("out/trm"),
)

# Tables trm-config and training-config of the paper. Its "6 cycles" are taken for inner cycles. It evaluates every
# 12,951 steps, which are 2500 epochs with ConceptARC and more epochs without (docs/results/paper_preset.md).
_PAPER = dataclasses.replace(
    _TRM,
    preset="paper",
    model=RecursiveConfig(l_cycles=6, mixer="cayley", streams=4, mixer_form="paper", compute="bfloat16"),
    steps=500_000,
    clip=1.0,
    decay_at=(0.8, 0.9),
    decay_to=(0.316, 0.1),
    out=Path("out/paper"),
)

# For hours on one GPU: a narrower model, smaller batches, and fewer variants in evaluations.
_ARC_SMALL = TrainConfig(
    preset="arc-small",
    task=TASKS["arc"](),
    model=RecursiveConfig(dim=256, heads=4, compute="bfloat16"),
    steps=50_000,
    batch=128,
    warmup=1000,
    clip=1.0,
    compile=True,
    checkpoint_every=2000,
    evaluate_every=10_000,
    evaluate_variants=20,
    log_every=50,
    out=Path("out/arc-small"),
)

# For minutes on two cores: 4 × 4 Sudoku. Test puzzles become solved within about 250 steps after step 1500.
_LAPTOP = TrainConfig(
    preset="laptop",
    task=TASKS["sudoku"](),
    model=RecursiveConfig(dim=64, heads=4, inner_multiple=64, puzzle_slots=1, h_cycles=2, l_cycles=2, halt_max_steps=4),
    steps=2250,
    batch=64,
    lr=2e-3,
    warmup=50,
    clip=1.0,
    ema=0.98,
    threads=1,
    checkpoint_every=500,
    evaluate_every=750,
    out=Path("out/laptop"),
)

PRESETS: dict[str, TrainConfig] = {c.preset: c for c in (_PAPER, _TRM, _ARC_SMALL, _LAPTOP)}

# For minutes on one large GPU: 75 million weights, 95 million tokens of the 800 public puzzles.
_ARC_DECODER = ArcDecoderRun(model=ArcDecoderConfig(compute="bfloat16"))

# For half an hour on one large GPU: more epochs and more variants.
_ARC_DECODER_LONG = ArcDecoderRun(
    preset="arc-decoder-long",
    task=ArcConfig(augmentations=300, keep_answer_colours=True),
    model=ArcDecoderConfig(compute="bfloat16"),
    epochs=650,
    evaluate_variants=300,
    out=Path("out/arc-decoder-long"),
)

# For minutes on two cores: the few puzzles with small grids.
_ARC_DECODER_TINY = ArcDecoderRun(
    preset="arc-decoder-tiny",
    task=ArcConfig(augmentations=16, keep_answer_colours=True, side=6),
    model=ArcDecoderConfig(dim=64, layers=2, heads=2, inner=128, dropout=0.0),
    epochs=40,
    tokens=1024,
    evaluate_variants=8,
    slots=32,
    log_every=20,
    out=Path("out/arc-decoder-tiny"),
)

DECODERS: dict[str, ArcDecoderRun] = {c.preset: c for c in (_ARC_DECODER, _ARC_DECODER_LONG, _ARC_DECODER_TINY)}
