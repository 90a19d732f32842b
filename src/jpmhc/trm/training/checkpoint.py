"""Checkpoints: folders that appear whole or not at all, are verified before use, and say who wrote them.

A checkpoint is `step-00001234/` with `manifest.json` (step, configuration, the task's fingerprint, size and checksum of
every file), `shared.pt` (weights, averages, optimisers) and one `rank-N.pt` per process (its rows in flight, random
state, its part of a sharded optimiser). It is written under a temporary name, flushed to disk, and renamed when all
ranks are done. Newer checkpoints than the one a run goes on from are renamed aside: they are neither found nor counted.
"""

import contextlib
import json
import os
import re
import shutil
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from jpmhc.trm.model import RecursiveModel
from jpmhc.trm.training.config import TrainConfig

FORMAT = "jpmhc checkpoint 1"
_ENTRIES = {"step": int, "ranks": int, "fingerprint": str, "config": dict, "files": dict}  # of a manifest
_NAME = re.compile(r"step-(\d{8})")


class Damaged(ValueError):
    """The files of a checkpoint are not those that were written."""


@dataclass(frozen=True)
class Checkpoint:
    """A verified checkpoint."""

    path: Path
    step: int
    ranks: int
    config: TrainConfig
    fingerprint: str

    def shared(self, device: torch.device | str = "cpu") -> dict[str, Any]:
        """What all ranks have in common."""
        return torch.load(self.path / "shared.pt", map_location=device, weights_only=True)

    def rank(self, rank: int, device: torch.device | str = "cpu") -> dict[str, Any]:
        """What belongs to one rank."""
        return torch.load(self.path / f"rank-{rank}.pt", map_location=device, weights_only=True)


def folders(run: Path) -> list[Path]:
    """Checkpoint folders of a run, oldest first; unfinished ones are not among them."""
    parent = run / "checkpoints"
    return sorted(p for p in parent.iterdir() if _NAME.fullmatch(p.name)) if parent.is_dir() else []


def begin(run: Path, step: int) -> Path:
    """The temporary folder that the files of a new checkpoint go to."""
    path = run / "checkpoints" / f"step-{step:08d}.unfinished"
    shutil.rmtree(path, ignore_errors=True)
    path.mkdir(parents=True)
    return path


def write(path: Path, name: str, content: dict[str, Any]) -> None:
    """Write one file of a checkpoint through to the disk."""
    with open(path / name, "wb") as file:
        torch.save(content, file)
        file.flush()
        os.fsync(file.fileno())


def finish(path: Path, config: TrainConfig, fingerprint: str, ranks: int, keep: int) -> Path:
    """Describe the files, give the folder its name, remove all but the `keep` newest; returns the new name."""
    step = _step(path)
    manifest = {
        "format": FORMAT,
        "step": step,
        "ranks": ranks,
        "fingerprint": fingerprint,
        "config": json.loads(config.to_json()),
        "files": {p.name: {"bytes": p.stat().st_size, "crc32": _checksum(p)} for p in sorted(path.iterdir())},
    }
    with open(path / "manifest.json", "w") as file:
        json.dump(manifest, file, indent=2)
        file.flush()
        os.fsync(file.fileno())
    final = path.with_name(f"step-{step:08d}")
    shutil.rmtree(final, ignore_errors=True)
    path.rename(final)
    _sync_folder(final.parent)
    for old in folders(final.parent.parent)[:-keep]:
        shutil.rmtree(old)
    return final


def set_aside(run: Path, step: int) -> list[str]:
    """Rename checkpoints newer than the one that a run goes on from; returns a sentence about each."""
    said = []
    for path in folders(run):
        if _step(path) <= step:
            continue
        why, ending = f"the run goes on from step {step}", "superseded"
        try:
            verify(path)
        except ValueError as fault:
            why, ending = str(fault), "damaged"
        aside = path.with_name(f"{path.name}.{ending}")
        shutil.rmtree(aside, ignore_errors=True)
        path.rename(aside)
        said.append(f"{why}; {path.name} is now {aside.name}")
    return said


def verify(path: Path) -> Checkpoint:
    """Open a checkpoint; a foreign, torn or damaged one is refused by name."""
    if not path.is_dir():
        raise ValueError(f"there is no checkpoint at {path}")
    try:
        manifest = json.loads((path / "manifest.json").read_text())
    except FileNotFoundError:
        raise Damaged(f"{path} is not a checkpoint of jpmhc: it has no manifest.json") from None
    except ValueError as error:
        raise Damaged(f"the checkpoint {path} is damaged: manifest.json is not valid JSON ({error})") from None
    if not isinstance(manifest, dict) or not manifest.get("format"):
        raise Damaged(f"the checkpoint {path} is damaged: manifest.json does not say its format")
    if (found := manifest["format"]) != FORMAT:
        raise ValueError(f"{path} is not a checkpoint this version reads: its format is {found!r}, not {FORMAT!r}")
    if missing := sorted(name for name, kind in _ENTRIES.items() if not isinstance(manifest.get(name), kind)):
        raise Damaged(f"the checkpoint {path} is damaged: manifest.json lacks {', '.join(missing)}")
    for name, expected in manifest["files"].items():
        file = path / name
        if not isinstance(expected, dict) or {"bytes", "crc32"} - expected.keys():
            raise Damaged(f"the checkpoint {path} is damaged: manifest.json lacks the size or checksum of {name}")
        if not file.is_file():
            raise Damaged(f"the checkpoint {path} is damaged: {name} is missing")
        if file.stat().st_size != expected["bytes"]:
            size = file.stat().st_size
            raise Damaged(f"the checkpoint {path} is damaged: {name} has {size} of {expected['bytes']} bytes")
        if _checksum(file) != expected["crc32"]:
            raise Damaged(f"the checkpoint {path} is damaged: the contents of {name} do not match its checksum")
    try:
        config = TrainConfig.from_json(json.dumps(manifest["config"]))
    except (ValueError, TypeError) as error:
        raise ValueError(f"{path} is not a checkpoint this version reads: {error}") from None
    return Checkpoint(path, manifest["step"], manifest["ranks"], config, manifest["fingerprint"])


def intact(run: Path) -> list[Path]:
    """Checkpoint folders of a run that can be used, newest first."""
    found = []
    for path in reversed(folders(run)):
        with contextlib.suppress(ValueError):
            found.append(verify(path).path)
    return found


def find(run: Path, which: str) -> Checkpoint:
    """The checkpoint to go on from.

    Args:
        run: Folder of the run.
        which: "latest" (refused if it is damaged), "intact" (the newest that is not), or the folder of a checkpoint or
            of another run.
    """
    if which not in ("latest", "intact"):
        return locate(which)
    found = folders(run)
    if not found:
        raise ValueError(f"there is no checkpoint in {run / 'checkpoints'} to resume from")
    faults = []
    for path in reversed(found):
        try:
            return verify(path)
        except Damaged as fault:
            if which == "latest":
                good = intact(run)
                advice = f"--resume intact goes on from {good[0].name}" if good else "no other checkpoint is intact"
                raise Damaged(f"{fault}; {advice}") from None
            faults.append(str(fault))
    raise ValueError("no checkpoint is intact: " + "; ".join(faults))


def locate(path: Path | str) -> Checkpoint:
    """The checkpoint to answer with: the folder's own, or the newest of a run, refused if it is damaged."""
    path = Path(path)
    found = folders(path)
    named = _NAME.fullmatch(path.absolute().name) or (path / "manifest.json").exists()
    if path.is_dir() and not found and not named:
        raise ValueError(f"{path} is neither a checkpoint nor a run that has one")
    try:
        return verify(found[-1] if found else path)
    except Damaged as fault:
        good = intact(path if found else path.parent.parent)
        advice = f"; name an intact checkpoint instead: {', '.join(map(str, good))}" if good else ""
        raise Damaged(f"{fault}{advice}") from None


def load_model(checkpoint: Checkpoint, *, ema: bool = True, device: torch.device | str = "cpu") -> RecursiveModel:
    """The model of a checkpoint, ready to answer.

    Args:
        checkpoint: Where from.
        ema: Take the averaged weights; a run with `ema=0` has only the weights themselves.
        device: Where to put the model.
    """
    shared = checkpoint.shared()
    vocabulary, length, identifiers = shared["shape"]
    model = RecursiveModel(checkpoint.config.model, vocabulary, length, identifiers)
    weights = shared["average"] if ema and shared["average"] is not None else shared["core"]
    model.core.load_state_dict(weights)
    model.puzzles.load_state_dict(shared["puzzles"])
    return model.to(device).eval()


def _step(path: Path) -> int:
    return int(path.name[5:13])


def _checksum(path: Path) -> int:
    value = 0
    with open(path, "rb") as file:
        while block := file.read(1 << 22):
            value = zlib.crc32(block, value)
    return value


def _sync_folder(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
