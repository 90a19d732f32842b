"""Checkpoints whose checksums are right and whose content is not: one change each, with the key that it spoils."""

import io
import json
import pickle
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from jpmhc.experiments.training import checkpoint

Change = Callable[[dict[str, Any]], Any]


def without(*keys: Any) -> Change:
    """Take away the value that these keys lead to."""

    def change(content: dict[str, Any]) -> dict[str, Any]:
        inner = content
        for key in keys[:-1]:
            inner = inner[key]
        del inner[keys[-1]]
        return content

    return change


def put(value: Any, *keys: Any) -> Change:
    """Put another value where these keys lead to; a function makes it from the value there."""

    def change(content: dict[str, Any]) -> dict[str, Any]:
        inner = content
        for key in keys[:-1]:
            inner = inner[key]
        inner[keys[-1]] = value(inner[keys[-1]]) if callable(value) else value
        return content

    return change


def narrow(tensor: torch.Tensor) -> torch.Tensor:
    """Cut a tensor's first dimension."""
    return tensor[:-1]


# What is changed in which file of a run with Grassmann frames, and what the refusal must name beside the file.
CHANGES: list[tuple[str, Change, str]] = [
    *(("shared.pt", without(key), key) for key in ("shape", "core", "average", "puzzles", "frames", "dense")),
    *(("rank-0.pt", without(key), key) for key in ("carry", "random", "random_cuda", "dense")),
    *(("shared.pt", put([], key), key) for key in ("core", "average", "puzzles", "frames", "dense")),
    ("shared.pt", put((1, 2), "shape"), "shape"),
    ("shared.pt", put((6, 10**15, 1), "shape"), "shape"),
    ("shared.pt", put((6, "16", 1), "shape"), "shape"),
    ("shared.pt", put({}, "core"), "core"),
    ("shared.pt", put(None, "core", "tokens"), "core"),
    ("shared.pt", put(narrow, "core", "tokens"), "tokens"),
    ("shared.pt", put(torch.Tensor.double, "core", "tokens"), "tokens"),
    ("shared.pt", put(torch.Tensor.to_sparse, "core", "tokens"), "tokens"),
    ("shared.pt", without("average", "tokens"), "average"),
    ("shared.pt", put(narrow, "puzzles", "weight"), "puzzles"),
    ("shared.pt", put({}, "puzzles"), "puzzles"),
    ("shared.pt", put({}, "dense"), "dense"),
    ("shared.pt", put({}, "dense", "state"), "dense"),
    ("shared.pt", without("dense", "state", 0, "exp_avg"), "exp_avg"),
    ("shared.pt", put(narrow, "dense", "state", 0, "exp_avg"), "exp_avg"),
    ("shared.pt", put(3, "dense", "state", 0, "step"), "step"),
    ("shared.pt", without("dense", "param_groups", 0, "betas"), "betas"),
    ("shared.pt", put([], "dense", "param_groups"), "param_groups"),
    ("shared.pt", put("corrected", "dense", "param_groups", 0, "form"), "form"),
    ("shared.pt", put({}, "frames"), "frames"),
    ("shared.pt", put(narrow, "frames", "frames", "state", 0, "momentum"), "momentum"),
    ("rank-0.pt", put(narrow, "carry", "z_h"), "z_h"),
    ("rank-0.pt", put(torch.Tensor.long, "carry", "halted"), "halted"),
    ("rank-0.pt", put(lambda t: t + 10**6, "carry", "identifiers"), "identifiers"),
    ("rank-0.pt", without("carry", "labels"), "labels"),
    ("rank-0.pt", put(narrow, "random"), "random"),
    ("rank-0.pt", put(torch.Tensor.float, "random"), "random"),
    ("rank-0.pt", put([1, 2], "random"), "random"),
    *((file, lambda content: list(content), "list") for file in ("shared.pt", "rank-0.pt")),
]


def _write_old_pickle() -> bytes:
    file = io.BytesIO()
    torch.save({"core": {}}, file, _use_new_zipfile_serialization=False)
    return file.getvalue()


def _write_zip() -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("readme", "nothing")
    return file.getvalue()


# Whole files that are something else.
FILES: dict[str, bytes] = {
    "empty": b"",
    "text": b"weights",
    "zip": _write_zip(),
    "old pickle": _write_old_pickle(),
    "plain pickle": pickle.dumps({"core": {}}),
}


def change_content(folder: Path, file: str, change: Change) -> None:
    """Change what a file of a checkpoint holds, and correct the manifest."""
    content = torch.load(folder / file, weights_only=True)
    torch.save(change(content), folder / file)
    correct_manifest(folder)


def replace_file(folder: Path, file: str, written: bytes) -> None:
    """Replace a file of a checkpoint, and correct the manifest."""
    (folder / file).write_bytes(written)
    correct_manifest(folder)


def correct_manifest(folder: Path) -> None:
    """Give the manifest of a checkpoint the sizes and checksums that its files have."""
    manifest = json.loads((folder / "manifest.json").read_text())
    for name in manifest["files"]:
        written = (folder / name).read_bytes()
        manifest["files"][name] = {"bytes": len(written), "crc32": zlib.crc32(written)}
    checkpoint.write_manifest(folder, manifest)
