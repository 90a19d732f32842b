"""Damaged runs: changed files are noticed, wrong content is refused in one line, a log loses the lines that were hit.

Five kinds of damage: files that are no longer those that were written; files whose checksums were corrected afterwards
but whose content does not fit; a manifest with other content; lines of the log that are torn; and a disk that is full
when a command writes.
"""

import copy
import io
import json
import shutil
import signal
from pathlib import Path
from typing import Any

import numpy as np
import torch

from jpmhc.experiments.training import checkpoint
from jpmhc.experiments.training.config import TrainConfig
from jpmhc.experiments.training.log import Log
from jpmhc.experiments.training.loop import Trainer
from jpmhc.experiments.training.processes import World
from tests.campaign import full_disks
from tests.campaign.forked import make_folder, start_run
from tests.campaign.hostile_tasks import make_value
from tests.campaign.kills import MODELS, SECONDS, make_run
from tests.campaign.refusals import find_fault
from tests.campaign.tally import Tally
from tests.experiments.training.wrong_contents import correct_manifest

ROUND = 200
FULL_DISKS = 8  # one attack out of so many is a full disk


def run(rng: np.random.Generator, size: int) -> Tally:
    """Damage copies of a finished run `size` times."""
    tally = Tally()
    with make_folder() as name:
        folder = Path(name)
        whole = make_run(folder / "whole", MODELS[rng.integers(len(MODELS))])
        running = start_run(whole, folder / "output")
        if running.wait(SECONDS) != 0:
            running.kill(signal.SIGKILL)
            tally.fail(f"the run that is to be damaged failed: {running.said()[-300:]!r}")
            return tally
        shutil.rmtree(whole.out / "tensorboard", ignore_errors=True)
        if fault := full_disks.make_workspace(folder / "workspace"):
            tally.fail(fault)
            return tally
        kinds = (damage_file, damage_file, spoil_content, spoil_content, spoil_bytes, spoil_manifest, tear_log)
        for number in range(size):
            if number < size // FULL_DISKS:  # in forked processes, so before this one computes
                what, fault = full_disks.fill_disk(rng, folder / "workspace", folder / "full")
                tally.fail(f"{what}: {fault}") if fault else tally.hold()
                shutil.rmtree(folder / "full", ignore_errors=True)
                continue
            shutil.copytree(whole.out, folder / "run")
            what, fault = kinds[rng.integers(len(kinds))](rng, whole, folder / "run")
            tally.fail(f"{what}: {fault}") if fault else tally.hold()
            shutil.rmtree(folder / "run")
    return tally


def damage_file(rng: np.random.Generator, config: TrainConfig, run: Path) -> tuple[str, str | None]:
    """Change the bytes of one file of the newest checkpoint: it must be refused, and the one before it found."""
    *_, older, newest = checkpoint.list_folders(run)
    file = pick(rng, sorted(newest.iterdir()))
    before = file.read_bytes()
    after = pick(rng, (flip_bit, flip_bit, flip_bit, cut, extend, blank, overwrite))(rng, before)
    what = f"{file.name}, {len(before)} bytes, became {len(after)}"
    if rng.random() < 0.05:
        what, after = f"{file.name} was removed", None
        file.unlink()
    else:
        file.write_bytes(after)
    if after == before:
        return what, None
    found, fault = find_fault(lambda: checkpoint.choose_checkpoint(run, "latest"), str(newest))
    if found is not None or fault:
        return what, fault or "was not noticed"
    found, fault = find_fault(lambda: checkpoint.choose_checkpoint(run, "intact"))
    return what, fault or (None if found is not None and found.path == older else "the older checkpoint was not found")


def spoil_content(rng: np.random.Generator, config: TrainConfig, run: Path) -> tuple[str, str | None]:
    """Change the structure of what a file holds, with right checksums: resuming and scoring must refuse it by name."""
    newest = checkpoint.list_folders(run)[-1]
    file = newest / pick(rng, ("shared.pt", "shared.pt", "rank-0.pt"))
    content = torch.load(file, weights_only=True)
    used = {"shared.pt": ("shape", "core", "average", "puzzles", "frames", "dense"), "rank-0.pt": ("carry", "random")}
    key = pick(rng, [key for key in used[file.name] if content[key] is not None])
    path = [key]
    while isinstance(inner := follow(content, path), dict | list | tuple) and len(inner) and rng.random() < 0.8:
        path.append(pick(rng, list(inner)) if isinstance(inner, dict) else int(rng.integers(len(inner))))
    old = follow(content, path)
    new = make_other(rng, old)
    content = put_value(content, path, new)
    torch.save(content, file)
    correct_manifest(newest)
    what = f"{file.name}, {' '.join(map(str, path))}: {describe(old)} became {describe(new)}"
    found, fault = find_fault(lambda: resume(config, run), str(file))
    return what, fault or ("was not noticed" if found is not None else None)


def spoil_bytes(rng: np.random.Generator, config: TrainConfig, run: Path) -> tuple[str, str | None]:
    """Damage the bytes of a file and correct the checksums: no more can be asked than that nothing but a line comes."""
    newest = checkpoint.list_folders(run)[-1]
    file = newest / pick(rng, ("shared.pt", "rank-0.pt"))
    before = file.read_bytes()
    after = pick(rng, (flip_bit, cut, extend, blank, overwrite))(rng, before)
    file.write_bytes(after)
    correct_manifest(newest)
    return f"{file.name}, {len(before)} bytes, became {len(after)}", find_fault(lambda: resume(config, run))[1]


def spoil_manifest(rng: np.random.Generator, config: TrainConfig, run: Path) -> tuple[str, str | None]:
    """Put something hostile into the manifest, with its checksum: it is refused in a line, or legal."""
    newest = checkpoint.list_folders(run)[-1]
    manifest = json.loads((newest / "manifest.json").read_text())
    path: list[Any] = [pick(rng, ["config", "config", "config", *manifest])]
    while isinstance(inner := follow(manifest, path), dict) and inner and rng.random() < 0.9:
        path.append(pick(rng, list(inner)))
    new = make_value(rng)
    try:
        checkpoint.write_manifest(newest, put_value(manifest, path, new))
    except RecursionError:
        return "a manifest that cannot be written", None
    what = f"manifest.json, {' '.join(map(str, path))} became {describe(new)}"
    return what, find_fault(lambda: resume(config, run))[1]


def tear_log(rng: np.random.Generator, config: TrainConfig, run: Path) -> tuple[str, str | None]:
    """Change bytes of the log: every change may cost the line that it hits and the next one, where it joins the two."""
    path = run / "log.jsonl"
    text = path.read_bytes()
    lines = set(text.splitlines())
    changes = int(rng.integers(1, 4))
    for _ in range(changes):
        text = flip_bit(rng, text)
    if rng.random() < 0.3:
        text, changes = cut(rng, text), len(lines)
    path.write_bytes(text)
    with Log(run, config.steps) as log:
        known = len(log.known)
    kept = lines & set(path.read_bytes().splitlines())
    fault = None if len(kept) >= len(lines) - 2 * changes else f"{len(lines)} lines became {len(kept)}"
    return f"{changes} changes of the log with {known} lines left", fault


def resume(config: TrainConfig, run: Path) -> Any:
    """Load all that a resumed run loads, and the model that an evaluation loads."""
    found = checkpoint.choose_checkpoint(run, "latest")
    checkpoint.load_model(found)
    return Trainer(config, World(0, 1, torch.device("cpu")), found)


def make_other(rng: np.random.Generator, old: Any) -> Any:
    """Make a value that has another type, shape or length than the old one."""
    others: list[Any] = ["x" * 5000, {"a": 1}, [None] * 17, torch.zeros(2, 3, 5), torch.eye(4).to_sparse(), b"bytes"]
    if isinstance(old, torch.Tensor):
        dtype = torch.float64 if old.dtype != torch.float64 else torch.int8
        others += [old.to(dtype), old[None], old.flatten()[:0], None]
    elif isinstance(old, dict):
        others += [{}, None, {key: value for place, (key, value) in enumerate(old.items()) if place}]
    elif not isinstance(old, str):
        others += ["word"]
    return pick(rng, others)


def follow(content: Any, path: list[Any]) -> Any:
    """Return the value that keys and places lead to."""
    for key in path:
        content = content[key]
    return content


def put_value(content: Any, path: list[Any], value: Any) -> Any:
    """Return a copy of the content with another value where keys and places lead to."""
    if not path:
        return value
    changed = list(content) if isinstance(content, tuple) else copy.copy(content)
    changed[path[0]] = put_value(content[path[0]], path[1:], value)
    return tuple(changed) if isinstance(content, tuple) else changed


def describe(value: Any) -> str:
    """Write a value for a message."""
    if isinstance(value, torch.Tensor):
        return f"{value.dtype} {list(value.shape)}"
    return f"{type(value).__name__} {str(value)[:30]!r}" if not isinstance(value, dict | list) else type(value).__name__


def pick(rng: np.random.Generator, choices: Any) -> Any:
    """Draw one of the choices."""
    return choices[int(rng.integers(len(choices)))]


def flip_bit(rng: np.random.Generator, data: bytes) -> bytes:
    """Flip one bit."""
    changed = bytearray(data)
    changed[int(rng.integers(len(data)))] ^= 1 << int(rng.integers(8))
    return bytes(changed)


def cut(rng: np.random.Generator, data: bytes) -> bytes:
    """Cut the end off."""
    return data[: int(rng.integers(len(data)))]


def extend(rng: np.random.Generator, data: bytes) -> bytes:
    """Append bytes."""
    return data + rng.bytes(int(rng.integers(1, 100)))


def blank(rng: np.random.Generator, data: bytes) -> bytes:
    """Put zeros in the place of some bytes, as a lost sector does."""
    start = int(rng.integers(len(data)))
    count = min(int(rng.integers(1, 4096)), len(data) - start)
    return data[:start] + bytes(count) + data[start + count :]


def overwrite(rng: np.random.Generator, data: bytes) -> bytes:
    """Replace everything by something else."""
    other = io.BytesIO()
    torch.save({"core": torch.zeros(3)}, other)
    return pick(rng, (b"", b"{}", b"[" * 5000, rng.bytes(len(data)), other.getvalue(), data[::-1]))
