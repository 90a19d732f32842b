"""Checkpoints: folders that appear whole or not at all, and are verified before they are used.

A checkpoint is `step-00001234/` with `manifest.json` (step, configuration, the task's fingerprint, size and checksum of
every file), `shared.pt` (weights, averages, optimisers) and one `rank-N.pt` per process (its rows in flight, the random
generators, its part of a sharded optimiser). It is written under a temporary name, flushed to disk, and renamed when
all processes are done. Checkpoints newer than the one that a run resumes are renamed: they are neither found nor
counted any more.
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
        """Load what all processes have in common."""
        return torch.load(self.path / "shared.pt", map_location=device, weights_only=True)

    def rank(self, rank: int, device: torch.device | str = "cpu") -> dict[str, Any]:
        """Load what belongs to one process."""
        return torch.load(self.path / f"rank-{rank}.pt", map_location=device, weights_only=True)


def list_folders(run: Path) -> list[Path]:
    """List the checkpoint folders of a run, oldest first, without unfinished ones."""
    parent = run / "checkpoints"
    return sorted(p for p in parent.iterdir() if _NAME.fullmatch(p.name)) if parent.is_dir() else []


def begin_checkpoint(run: Path, step: int) -> Path:
    """Make the temporary folder that the files of a new checkpoint go to."""
    path = run / "checkpoints" / f"step-{step:08d}.unfinished"
    shutil.rmtree(path, ignore_errors=True)
    path.mkdir(parents=True)
    return path


def write_part(path: Path, name: str, content: dict[str, Any]) -> None:
    """Write one file of a checkpoint through to the disk."""
    with open(path / name, "wb") as file:
        torch.save(content, file)
        file.flush()
        os.fsync(file.fileno())


def finish_checkpoint(path: Path, config: TrainConfig, fingerprint: str, ranks: int) -> Path:
    """Write the manifest, give the folder its final name, and remove the oldest checkpoints; returns the new name."""
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
    for old in list_folders(final.parent.parent)[: -config.keep]:
        shutil.rmtree(old)
    return final


def set_newer_aside(run: Path, step: int) -> list[str]:
    """Rename checkpoints newer than the one that a run resumes; returns a sentence about each."""
    said = []
    for path in list_folders(run):
        if _step(path) <= step:
            continue
        why, ending = f"the run goes on from step {step}", "superseded"
        try:
            verify_checkpoint(path)
        except ValueError as fault:
            why, ending = str(fault), "damaged"
        aside = path.with_name(f"{path.name}.{ending}")
        shutil.rmtree(aside, ignore_errors=True)
        path.rename(aside)
        said.append(f"{why}; {path.name} is now {aside.name}")
    return said


def verify_checkpoint(path: Path) -> Checkpoint:
    """Open a checkpoint; one that is foreign, incomplete or damaged is refused by name."""
    if not path.is_dir():
        raise ValueError(f"there is no checkpoint at {path}")
    try:
        manifest = json.loads((path / "manifest.json").read_text())
    except FileNotFoundError:
        raise Damaged(f"{path} is not a checkpoint of jpmhc: it has no manifest.json") from None
    except ValueError as error:
        raise Damaged(f"the checkpoint {path} is damaged: manifest.json is not valid JSON ({error})") from None
    if isinstance(manifest, dict) and (found := manifest.get("format")) and found != FORMAT:
        raise ValueError(f"{path} is not a checkpoint this version reads: its format is {found!r}, not {FORMAT!r}")
    if fault := _fault_of_manifest(manifest) or _fault_of_files(path, manifest["files"]):
        raise Damaged(f"the checkpoint {path} is damaged: {fault}")
    try:
        config = TrainConfig.from_json(json.dumps(manifest["config"]))
    except (ValueError, TypeError) as error:
        raise ValueError(f"{path} is not a checkpoint this version reads: {error}") from None
    return Checkpoint(path, manifest["step"], manifest["ranks"], config, manifest["fingerprint"])


def _fault_of_manifest(manifest: Any) -> str | None:
    """Say what is wrong with a manifest, or return None."""
    if not isinstance(manifest, dict) or not manifest.get("format"):
        return "manifest.json does not say its format"
    missing = sorted(name for name, kind in _ENTRIES.items() if not isinstance(manifest.get(name), kind))
    return f"manifest.json lacks {', '.join(missing)}" if missing else None


def _fault_of_files(path: Path, files: dict[str, Any]) -> str | None:
    """Say which file is not the one that the manifest describes, or return None."""
    for name, expected in files.items():
        file = path / name
        if not isinstance(expected, dict) or {"bytes", "crc32"} - expected.keys():
            return f"manifest.json lacks the size or checksum of {name}"
        if not file.is_file():
            return f"{name} is missing"
        if (size := file.stat().st_size) != expected["bytes"]:
            return f"{name} has {size} of {expected['bytes']} bytes"
        if _checksum(file) != expected["crc32"]:
            return f"the contents of {name} do not match its checksum"
    return None


def list_intact(run: Path) -> list[Path]:
    """List the checkpoint folders of a run that can be used, newest first."""
    found = []
    for path in reversed(list_folders(run)):
        with contextlib.suppress(ValueError):
            found.append(verify_checkpoint(path).path)
    return found


def find_checkpoint(run: Path, which: str) -> Checkpoint:
    """Find the checkpoint that a run resumes.

    Args:
        run: Folder of the run.
        which: "latest" (refused if it is damaged), "intact" (the newest that is not), or the folder of a checkpoint or
            of another run.
    """
    if which not in ("latest", "intact"):
        return locate_checkpoint(which)
    found = list_folders(run)
    if not found:
        raise ValueError(f"there is no checkpoint in {run / 'checkpoints'} to resume from")
    faults = []
    for path in reversed(found):
        try:
            return verify_checkpoint(path)
        except Damaged as fault:
            if which == "latest":
                good = list_intact(run)
                advice = f"--resume intact goes on from {good[0].name}" if good else "no other checkpoint is intact"
                raise Damaged(f"{fault}; {advice}") from None
            faults.append(str(fault))
    raise ValueError("no checkpoint is intact: " + "; ".join(faults))


def locate_checkpoint(path: Path | str) -> Checkpoint:
    """Open the checkpoint in a folder, or the newest one of a run; it is refused if it is damaged."""
    path = Path(path)
    found = list_folders(path)
    named = _NAME.fullmatch(path.absolute().name) or (path / "manifest.json").exists()
    if path.is_dir() and not found and not named:
        raise ValueError(f"{path} is neither a checkpoint nor a run that has one")
    try:
        return verify_checkpoint(found[-1] if found else path)
    except Damaged as fault:
        good = list_intact(path if found else path.parent.parent)
        advice = f"; name an intact checkpoint instead: {', '.join(map(str, good))}" if good else ""
        raise Damaged(f"{fault}{advice}") from None


def load_model(checkpoint: Checkpoint, *, ema: bool = True, device: torch.device | str = "cpu") -> RecursiveModel:
    """Load the model of a checkpoint, ready to answer.

    Args:
        checkpoint: The checkpoint.
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
