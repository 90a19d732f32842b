"""Published models with random weights, the files that they come in, and their answers computed from the formulas."""

import json
import math
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml

PREFIX = "_orig_mod.model.inner."
DIM, HEADS, SLOTS, INNER = 16, 2, 3, 256
TASKS = ("first", "second", "third")


def settings(over_positions: bool, **arch: Any) -> dict[str, Any]:
    """What all_config.yaml says of a small model."""
    return {
        "arch": {
            "name": "recursive_reasoning.trm@TinyRecursiveReasoningModel_ACTV1",
            "loss": {"name": "losses@ACTLossHead", "loss_type": "stablemax_cross_entropy"},
            "H_cycles": 2,
            "L_cycles": 3,
            "H_layers": 0,
            "L_layers": 2,
            "hidden_size": DIM,
            "num_heads": HEADS,
            "expansion": 4,
            "halt_max_steps": 2,
            "halt_exploration_prob": 0.1,
            "puzzle_emb_ndim": DIM,
            "puzzle_emb_len": SLOTS,
            "pos_encodings": "none" if over_positions else "rope",
            "forward_dtype": "float32",
            "mlp_t": over_positions,
            "no_ACT_continue": True,
            **arch,
        },
        "lr": 2e-4,
        "beta1": 0.9,
        "beta2": 0.99,
        "weight_decay": 1.0,
        "lr_warmup_steps": 5,
        "global_batch_size": 4,
        "puzzle_emb_lr": 1e-3,
        "puzzle_emb_weight_decay": 0.5,
        "ema": True,
        "ema_rate": 0.9,
        "seed": 3,
        "data_paths": ["data/somewhere"],
        "run_name": "a run",
    }


def random_weights(mlp_t: bool, vocabulary: int, length: int, identifiers: int) -> dict[str, torch.Tensor]:
    """The tensors of a small model without their prefix; initial states are bfloat16, as in the public files."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator) / math.sqrt(shape[-1])

    positions = SLOTS + length
    weights = {
        "H_init": draw(DIM).mul(4).bfloat16(),
        "L_init": draw(DIM).mul(4).bfloat16(),
        "embed_tokens.embedding_weight": draw(vocabulary, DIM),
        "lm_head.weight": draw(vocabulary, DIM),
        "q_head.weight": draw(2, DIM),
        "q_head.bias": draw(2),
        "puzzle_emb.weights": draw(identifiers, DIM),
    }
    for i in range(2):
        layer = f"L_level.layers.{i}."
        if mlp_t:
            weights[f"{layer}mlp_t.gate_up_proj.weight"] = draw(2 * INNER, positions)
            weights[f"{layer}mlp_t.down_proj.weight"] = draw(positions, INNER)
        else:
            weights[f"{layer}self_attn.qkv_proj.weight"] = draw(3 * DIM, DIM)
            weights[f"{layer}self_attn.o_proj.weight"] = draw(DIM, DIM)
        weights[f"{layer}mlp.gate_up_proj.weight"] = draw(2 * INNER, DIM)
        weights[f"{layer}mlp.down_proj.weight"] = draw(DIM, INNER)
    return weights


def identifiers() -> list[str]:
    """Names of the rows of a table: tasks in another order than ours, a variant under every symmetry."""
    generator = np.random.default_rng(0)
    names = ["<blank>"]
    for task in reversed(TASKS):
        names.append(task)
        for symmetry in generator.permutation(8):
            colours = "".join(map(str, 1 + generator.permutation(9)))
            names.append(f"{task}|||t{symmetry}|||0{colours}")
    return names


def write_tasks(folder: Path) -> dict[str, Any]:
    """Write three ARC tasks of small grids, one to evaluate and two more; returns the options that name them."""
    generator = np.random.default_rng(1)

    def pair() -> dict[str, Any]:
        shape = generator.integers(1, 5, 2)
        return {side: generator.integers(0, 10, shape).tolist() for side in ("input", "output")}

    for name in TASKS:
        place = folder / ("evaluation" if name == TASKS[-1] else "extra")
        place.mkdir(parents=True, exist_ok=True)
        task = {"train": [pair(), pair()], "test": [pair()]}
        (place / f"{name}.json").write_text(json.dumps(task))
    return {"version": "none", "extra_tasks": folder / "extra", "evaluation_tasks": folder / "evaluation", "side": 4}


def write_files(folder: Path, weights: dict[str, torch.Tensor], config: Any, names: Any) -> dict[str, Path]:
    """Write a checkpoint and the two files beside it; returns where, by the names of an import's options."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = {
        "file": folder / "step_7",
        "identifiers": folder / "identifiers.json",
        "config": folder / "all_config.yaml",
    }
    torch.save(OrderedDict((PREFIX + name, tensor) for name, tensor in weights.items()), paths["file"])
    paths["identifiers"].write_text(json.dumps(names))
    paths["config"].write_text(yaml.safe_dump(config))
    return paths


class WrittenOut:
    """The public model in float64 NumPy, from its description and under its own names."""

    def __init__(self, weights: dict[str, torch.Tensor], config: dict[str, Any]) -> None:
        self.w = {name: tensor.double().numpy() for name, tensor in weights.items()}
        self.arch = config["arch"]

    def __call__(self, inputs: np.ndarray, identifiers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Logits of the tokens and the halting head's first value after all supervision steps."""
        arch, w = self.arch, self.w
        x = np.zeros((len(inputs), SLOTS + inputs.shape[1], DIM))
        x[:, 0] = w["puzzle_emb.weights"][identifiers]
        x[:, SLOTS:] = w["embed_tokens.embedding_weight"][inputs]
        x *= math.sqrt(DIM)
        high, low = (np.broadcast_to(w[name], x.shape) for name in ("H_init", "L_init"))
        for _ in range(arch["halt_max_steps"] * arch["H_cycles"]):
            for _ in range(arch["L_cycles"]):
                low = self.call(low + high + x)
            high = self.call(high + low)
        halting = high[:, 0] @ w["q_head.weight"].T + w["q_head.bias"]
        return high[:, SLOTS:] @ w["lm_head.weight"].T, halting[:, 0]

    def call(self, x: np.ndarray) -> np.ndarray:
        """The two layers, each a residual between positions and one between channels, with a norm after each."""
        for i in range(self.arch["L_layers"]):
            layer = f"L_level.layers.{i}."
            if self.arch["mlp_t"]:
                turned = x.swapaxes(1, 2)  # one row of positions for each channel, and the norm is over positions
                x = norm(turned + self.gated(turned, f"{layer}mlp_t.")).swapaxes(1, 2)
            else:
                x = norm(x + self.attention(x, f"{layer}self_attn."))
            x = norm(x + self.gated(x, f"{layer}mlp."))
        return x

    def gated(self, x: np.ndarray, prefix: str) -> np.ndarray:
        gate, up = np.split(x @ self.w[f"{prefix}gate_up_proj.weight"].T, 2, -1)
        return (gate / (1 + np.exp(-gate)) * up) @ self.w[f"{prefix}down_proj.weight"].T

    def attention(self, x: np.ndarray, prefix: str) -> np.ndarray:
        batch, length, _ = x.shape
        width = DIM // HEADS
        qkv = (x @ self.w[f"{prefix}qkv_proj.weight"].T).reshape(batch, length, 3, HEADS, width)
        angles = np.outer(np.arange(length), 1e4 ** (-np.arange(0, width, 2) / width))
        turn = np.exp(1j * angles)[None, :, None, :]

        def rotate(t: np.ndarray) -> np.ndarray:
            z = (t[..., : width // 2] + 1j * t[..., width // 2 :]) * turn
            return np.concatenate((z.real, z.imag), -1)

        scores = np.einsum("bqhd,bkhd->bhqk", rotate(qkv[:, :, 0]), rotate(qkv[:, :, 1])) / math.sqrt(width)
        share = np.exp(scores - scores.max(-1, keepdims=True))
        share /= share.sum(-1, keepdims=True)
        mixed = np.einsum("bhqk,bkhd->bqhd", share, qkv[:, :, 2]).reshape(batch, length, DIM)
        return mixed @ self.w[f"{prefix}o_proj.weight"].T


def norm(x: np.ndarray) -> np.ndarray:
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-5)
