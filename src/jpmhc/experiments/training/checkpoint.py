"""Checkpoints: folders that appear whole or not at all, and are verified before use.

A checkpoint is a folder `step-00001234/` with three kinds of files: `manifest.json` (step, configuration, the task's
fingerprint, which is a digest of its data, every file's size and checksum, and the manifest's own checksum),
`shared.pt` (weights, averaged weights, optimisers), and one `rank-N.pt` per process (rows in progress, random
generators, the process's shard of the optimiser). The folder is written under a temporary name, flushed to disk, and
renamed when all processes have finished.

An imported checkpoint has weights only, and its manifest has no processes; a run that resumes it has new rows and new
optimisers. When a run resumes a checkpoint, newer checkpoints are renamed, so that they are ignored from then on.
"""

import contextlib
import json
import re
import shutil
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import torch

from jpmhc import checks
from jpmhc.experiments.models.recursive import RecursiveModel
from jpmhc.experiments.tasks.task import Task
from jpmhc.experiments.training.config import TrainConfig, restore
from jpmhc.experiments.training.contents import (
    RANK_ENTRIES,
    SHARED_ENTRIES,
    Content,
    explaining_misfit,
    load_content,
    load_weights,
    require_like,
    require_shape,
)
from jpmhc.files import NotJson, parse_json, replacing, sync_folder, write_file

FORMAT = "jpmhc checkpoint 2"
_FORMER = "jpmhc checkpoint 1"  # differs only in the manifest, which has no checksum of itself
_BLANK = b'"checksum": "00000000"'  # stands in the manifest while its checksum is computed
_ENTRIES = {"step": int, "ranks": int, "fingerprint": str, "config": dict, "files": dict}  # entries of a manifest
_NAME = re.compile(r"step-(\d{8})")


class DamagedCheckpoint(ValueError):
    """The error for a checkpoint whose files are missing or have changed since they were written."""


@dataclass(frozen=True)
class Checkpoint:
    """A verified checkpoint."""

    path: Path
    step: int
    ranks: int
    config: TrainConfig
    fingerprint: str

    def shared(self, device: torch.device | str = "cpu") -> Content:
        """Load the content that all processes share."""
        return load_content(self.path / "shared.pt", SHARED_ENTRIES, device)

    def rank(self, rank: int, device: torch.device | str = "cpu") -> Content:
        """Load the content that the process with number `rank` wrote."""
        return load_content(self.path / f"rank-{rank}.pt", RANK_ENTRIES, device)


def list_folders(run: Path) -> list[Path]:
    """Return the finished checkpoint folders of a run, oldest first."""
    parent = run / "checkpoints"
    return sorted(p for p in parent.iterdir() if _NAME.fullmatch(p.name)) if parent.is_dir() else []


def unfinished_folder(run: Path, step: int) -> Path:
    """Return the path of the temporary folder for a new checkpoint."""
    return run / "checkpoints" / f"step-{step:08d}.unfinished"


def begin_checkpoint(run: Path, step: int) -> Path:
    """Create an empty temporary folder for a new checkpoint and return its path."""
    path = unfinished_folder(run, step)
    shutil.rmtree(path, ignore_errors=True)
    path.mkdir(parents=True)
    return path


def write_part(path: Path, name: str, content: Mapping[str, object]) -> None:
    """Write one file of a checkpoint and flush it to disk."""
    with replacing(path / name) as file:
        torch.save(content, file)


def finish_checkpoint(path: Path, config: TrainConfig, fingerprint: str, ranks: int) -> Path:
    """Write the manifest, rename the folder to its final name, remove old checkpoints, and return the final path."""
    step = _step(path)
    manifest = {
        "format": FORMAT,
        "step": step,
        "ranks": ranks,
        "fingerprint": fingerprint,
        "config": json.loads(config.to_json()),
        "files": {p.name: {"bytes": p.stat().st_size, "crc32": _checksum(p)} for p in sorted(path.iterdir())},
    }
    write_manifest(path, manifest)
    final = path.with_name(f"step-{step:08d}")
    shutil.rmtree(final, ignore_errors=True)
    path.rename(final)
    sync_folder(final.parent)
    for old in list_folders(final.parent.parent)[: -config.keep]:
        shutil.rmtree(old)
    return final


def write_manifest(path: Path, manifest: Mapping[str, object]) -> None:
    """Write a checkpoint's manifest with a checksum of its own bytes, and flush it to disk."""
    blank = json.dumps({**manifest, "checksum": "0" * 8}, indent=2).encode()
    write_file(path / "manifest.json", blank.replace(_BLANK, b'"checksum": "%08x"' % zlib.crc32(blank)))


def set_newer_aside(run: Path, step: int) -> list[str]:
    """Rename a run's checkpoints that are newer than `step`, and return a sentence about each renamed checkpoint."""
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
    """Check a checkpoint's files and return it; raise a ValueError if it is damaged, or not of a readable format."""
    if not path.is_dir():
        raise ValueError(f"there is no checkpoint at {path}")
    try:
        written = (path / "manifest.json").read_bytes()
        manifest = parse_json(written)
    except FileNotFoundError:
        raise DamagedCheckpoint(f"{path} is not a checkpoint of jpmhc: it has no manifest.json") from None
    except NotJson as error:
        raise DamagedCheckpoint(f"the checkpoint {path} is damaged: manifest.json is {error}") from None
    form = manifest.get("format") if isinstance(manifest, dict) else None
    fault = None
    if form and "checksum" in manifest:
        blank = written.replace(f'"checksum": "{manifest["checksum"]}"'.encode(errors="replace"), _BLANK)
        if f"{zlib.crc32(blank):08x}" != manifest["checksum"]:
            fault = "the contents of manifest.json do not match its checksum"
    elif form == FORMAT:
        fault = "manifest.json lacks its checksum"
    if form and not fault and form not in (FORMAT, _FORMER):
        raise ValueError(
            f"{path} is not a checkpoint this version reads: its format is {checks.quote(form)}, not {FORMAT!r}"
        )
    if fault := fault or _fault_of_manifest(manifest) or _fault_of_files(path, manifest["files"]):
        raise DamagedCheckpoint(f"the checkpoint {path} is damaged: {fault}")
    try:
        config = restore(TrainConfig, manifest["config"])
    except ValueError as error:
        raise ValueError(f"{path} is not a checkpoint this version reads: {error}") from None
    return Checkpoint(path, manifest["step"], manifest["ranks"], config, manifest["fingerprint"])


def _fault_of_manifest(manifest: object) -> str | None:
    """Return a sentence about a manifest's fault, or None if it has none."""
    if not isinstance(manifest, dict) or not manifest.get("format"):
        return "manifest.json does not say its format"
    missing = sorted(name for name, kind in _ENTRIES.items() if type(manifest.get(name)) is not kind)
    if missing:
        return f"manifest.json lacks {', '.join(missing)}"
    if manifest["step"] < 0 or manifest["ranks"] < min(manifest["step"], 1):  # imported: no step, no process
        return f"manifest.json counts {manifest['step']} steps and {manifest['ranks']} processes"
    needed = chain(["shared.pt"], (f"rank-{rank}.pt" for rank in range(manifest["ranks"])))
    absent = next((name for name in needed if name not in manifest["files"]), None)
    return f"manifest.json does not list {absent}" if absent else None


def _fault_of_files(path: Path, files: Mapping[str, object]) -> str | None:
    """Return a sentence about the first file that differs from the manifest, or None if none does."""
    for name, expected in files.items():
        file = path / name
        if not isinstance(expected, dict) or any(type(expected.get(entry)) is not int for entry in ("bytes", "crc32")):
            return f"manifest.json lacks the size or checksum of {name}"
        if not file.is_file():
            return f"{name} is missing"
        if (size := file.stat().st_size) != expected["bytes"]:
            return f"{name} has {size} of {expected['bytes']} bytes"
        if _checksum(file) != expected["crc32"]:
            return f"the contents of {name} do not match its checksum"
    return None


def list_intact(run: Path) -> list[Path]:
    """Return the undamaged checkpoint folders of a run, newest first."""
    intact = []
    for path in reversed(list_folders(run)):
        with contextlib.suppress(ValueError):
            intact.append(verify_checkpoint(path).path)
    return intact


def choose_checkpoint(run: Path, which: str) -> Checkpoint | None:
    """Return the checkpoint that a run resumes, or None if the run starts anew.

    `which` is "no" (start anew), "latest" (the newest checkpoint; raise an error if it is damaged), "auto" (like
    "latest", but start anew if the run has no checkpoints), "intact" (the newest undamaged checkpoint), or the folder
    of a checkpoint or of another run.
    """
    folders = list_folders(run)
    if which == "no" or (which == "auto" and not folders):
        return None
    if which not in ("auto", "latest", "intact"):
        return locate_checkpoint(which)
    if not folders:
        raise ValueError(f"there is no checkpoint in {run / 'checkpoints'} to resume from")
    faults = []
    for path in reversed(folders):
        try:
            return verify_checkpoint(path)
        except DamagedCheckpoint as fault:
            if which != "intact":
                good = list_intact(run)
                advice = f"--resume intact goes on from {good[0].name}" if good else "no other checkpoint is intact"
                raise DamagedCheckpoint(f"{fault}; {advice}") from None
            faults.append(str(fault))
    raise ValueError("no checkpoint is intact: " + "; ".join(faults))


def locate_checkpoint(path: Path | str) -> Checkpoint:
    """Return the checkpoint in a folder, or the newest checkpoint of a run; raise an error if it is damaged."""
    path = Path(path)
    folders = list_folders(path)
    named = _NAME.fullmatch(path.absolute().name) or (path / "manifest.json").exists()
    if path.is_dir() and not folders and not named:
        raise ValueError(f"{path} is neither a checkpoint nor a run that has one")
    try:
        return verify_checkpoint(folders[-1] if folders else path)
    except DamagedCheckpoint as fault:
        good = list_intact(path if folders else path.parent.parent)
        advice = f"; name an intact checkpoint instead: {', '.join(map(str, good))}" if good else ""
        raise DamagedCheckpoint(f"{fault}{advice}") from None


def load_model(
    checkpoint: Checkpoint, task: Task | None = None, *, ema: bool = True, device: torch.device | str = "cpu"
) -> RecursiveModel:
    """Load the model of a checkpoint in evaluation mode, and check that it fits the task's rows if a task is given.

    With `ema` the averaged weights are loaded, if the checkpoint has them (a run with `ema=0` has none).
    """
    shared, file = checkpoint.shared(), checkpoint.path / "shared.pt"
    if task is not None:
        require_shape(shared, task, file)
    with explaining_misfit(file, "shape"):
        vocabulary, length, identifiers = shared["shape"]
        require_like(len(shared["puzzles"]["weight"]), identifiers, "the number of puzzles")
        model = RecursiveModel(checkpoint.config.model, vocabulary, length, identifiers)
    load_weights(model.core, shared, "average" if ema and shared["average"] is not None else "core", file)
    load_weights(model.puzzles, shared, "puzzles", file)
    return model.to(device).eval()


def _step(path: Path) -> int:
    return int(path.name[5:13])


def _checksum(path: Path) -> int:
    value = 0
    with open(path, "rb") as file:
        while block := file.read(1 << 22):
            value = zlib.crc32(block, value)
    return value
