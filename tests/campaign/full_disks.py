"""Full disks: a command that cannot write a file leaves what earlier commands wrote, and works once there is room.

A disk is full in two ways: no file may grow beyond a size (`RLIMIT_FSIZE`), or the workspace lies on a file system in
memory that has no room left, where mounting one is permitted. A third attack closes the pipe that output goes to.
"""

import json
import os
import resource
import select
import shutil
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import matplotlib.figure  # noqa: F401 - imported once, and not in every forked process anew
import numpy as np
import torch
import torch._dynamo
import torch.utils.tensorboard

from jpmhc import cli
from jpmhc.cli import compare, evaluate, import_trm, predict, report, train  # noqa: F401
from jpmhc.experiments.published import import_model
from tests.experiments.published import models

SECONDS = 120.0  # after which a command counts as hanging
_SUDOKU = [
    *("--dim", "16", "--heads", "2", "--inner-multiple", "16", "--puzzle-slots", "2", "--batch", "4", "--steps", "2"),
    *("--task.puzzles", "8", "--task.test-puzzles", "4", "--evaluate-every", "0", "--warmup", "1", "--device", "cpu"),
]

# Every command that writes into a run or a comparison, with words in which a path begins with @.
COMMANDS: dict[str, list[str]] = {
    "train": ["train", "--resume", "latest", "--steps", "4", "--checkpoint-every", "1", "--out", "@sudoku"],
    "evaluate": ["evaluate", "@arc", "--device", "cpu"],
    "predict": ["predict", "@arc", "--device", "cpu", "--tasks", "third"],
    "compare": ["compare", "sudoku", *_SUDOKU, "--arms", "plain", "cayley", "--out", "@compare"],
    "report": ["report", "@sudoku"],
    "import-trm": [
        *("import-trm", "@published/step_7", "--identifiers", "@published/identifiers.json"),
        *("--config", "@published/all_config.yaml", "--out", "@imported"),
        *("--extra-tasks", "@tasks/extra", "--evaluation-tasks", "@tasks/evaluation"),
    ],
}


def make_workspace(folder: Path) -> str | None:
    """Make runs, a comparison and results of every command; returns what went wrong."""
    options = models.write_tasks(folder / "tasks")
    weights = models.random_weights(False, 12, 16, len(models.identifiers()))
    paths = models.write_files(folder / "published", weights, models.settings(False), models.identifiers())
    import_model(**paths, out=folder / "arc", task_options=options)
    commands = {
        "train": ["train", *_SUDOKU, "--out", "@sudoku"],
        **{name: words for name, words in COMMANDS.items() if name not in ("train", "import-trm")},
    }
    for name, words in commands.items():
        status, said = run_command(words, folder)
        if status != 0:
            return f"{name} failed where there was room: {said[-300:]!r}"
    return None


def fill_disk(rng: np.random.Generator, whole: Path, folder: Path, name: str | None = None) -> tuple[str, str | None]:
    """Run a command in a copy of the workspace on a full disk; returns the attack, and what went wrong."""
    name = str(rng.choice(list(COMMANDS))) if name is None else name
    kinds = ["size", "size", "pipe"] + ["device"] * can_mount()
    kind, limit, room = str(rng.choice(kinds)), None, 0
    if kind == "size":
        sizes = [path.stat().st_size for path in whole.rglob("*") if path.is_file()]
        limit = max(0, int(rng.choice(sizes)) - 1) if rng.random() < 0.5 else int(10 ** rng.uniform(0, 5.5))
    elif kind == "device":
        room = int(10 ** rng.uniform(3.7, 5.7))
    with small_disk(folder, room + 2 * count_bytes(whole)) if kind == "device" else nullcontext():
        shutil.copytree(whole, folder, dirs_exist_ok=True, symlinks=True)
        if kind == "device":
            fill(folder, room)
        if name == "compare":
            (folder / "compare" / "runs" / "cayley-lr-0.002-seed-0.json").unlink()  # a run is missing
        before = read_files(folder)
        status, said = run_command(COMMANDS[name], folder, limit, reads=kind != "pipe")
        what = {"size": f"files of at most {limit} bytes", "device": f"{room} bytes of room", "pipe": "a closed pipe"}
        fault = find_fault(status, said, before, read_files(folder), limit)
        if kind == "pipe" and status != 0:
            fault = fault or f"ended with {status}"
        if fault is None and status != 0:
            (folder / "filling").unlink(missing_ok=True)
            status, said = run_command(COMMANDS[name], folder)
            fault = None if status == 0 else f"did not work once there was room: {said[-300:]!r}"
    return f"{name} with {what[kind]}", fault


def find_fault(
    status: int, said: str, before: dict[Path, bytes], after: dict[Path, bytes], limit: int | None
) -> str | None:
    """Say what is wrong about how a command ended and what it left, or return None."""
    if status not in (0, 2) or "Traceback" in said:
        return f"ended with {status}: {said[-300:]!r}"
    refusals = [line for line in said.splitlines() if line.startswith("jpmhc: ")]
    if status == 2 and len(refusals) != 1:
        return f"ended with {len(refusals)} sentences: {said[-300:]!r}"
    for path, content in before.items():
        now = after.get(path)
        if now == content or path.name in ("filling", "log.jsonl") or "tensorboard" in path.parts:
            continue
        if now is None:
            newer = [p for p in after if p.name == "manifest.json" and ".unfinished" not in str(p)]
            if "checkpoints" in path.parts and newer:
                continue  # an older checkpoint, removed when a newer one was whole
            return f"{path} is gone"
        if limit is not None and len(now) > limit:
            return f"{path} has {len(now)} bytes, beyond the limit of {limit}"
        if not is_whole(path, now):
            return f"{path} is not whole: {now[-60:]!r}"
    for path in after:
        if path.name.endswith(".new") or ".unfinished" in str(path):
            return f"{path} was left behind"
    logs = [path for path in before if path.name == "log.jsonl"]
    for path in logs:
        if not after.get(path, b"").startswith(before[path]):
            return f"{path} has lost lines"
    return None


def is_whole(path: Path, content: bytes) -> bool:
    """Whether a file is whole, as far as its end tells."""
    match path.suffix:
        case ".json":
            try:
                return json.loads(content) is not None
            except ValueError:
                return False
        case ".png":
            return b"IEND" in content[-12:]
        case ".html":
            return content.rstrip().endswith(b"</html>")
    return len(content) > 0


def read_files(folder: Path) -> dict[Path, bytes]:
    """Return the content of every file of a folder."""
    return {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def count_bytes(folder: Path) -> int:
    """Return the bytes of a folder's files, each of which takes whole pages."""
    return sum(-(-path.stat().st_size // 4096) * 4096 + 4096 for path in folder.rglob("*"))


def can_mount() -> bool:
    """Whether this process may mount a file system."""
    return os.geteuid() == 0 and shutil.which("mount") is not None and sys.platform == "linux"


@contextmanager
def small_disk(folder: Path, size: int) -> Iterator[None]:
    """Mount a file system of so many bytes at a folder."""
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def fill(folder: Path, room: int) -> None:
    """Fill a file system but for so many bytes."""
    free = os.statvfs(folder)
    (folder / "filling").write_bytes(bytes(max(0, free.f_bavail * free.f_frsize - room)))


def run_command(words: list[str], folder: Path, limit: int | None = None, reads: bool = True) -> tuple[int, str]:
    """Run a command in a forked process; returns its status and its output.

    Args:
        words: The command; @ stands for the folder.
        folder: The workspace.
        limit: Bytes beyond which no file may grow.
        reads: Whether anybody reads the output.
    """
    words = [f"{folder}/{word[1:]}" if word.startswith("@") else word for word in words]
    reader, writer = os.pipe()
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if not pid:
        os.close(reader)
        _become_command(lambda: cli.main(words), writer, limit)
    os.close(writer)
    said, until = b"", time.monotonic() + SECONDS
    if not reads:
        os.close(reader)
    else:
        while select.select([reader], [], [], max(0, until - time.monotonic()))[0]:
            if not (part := os.read(reader, 1 << 16)):
                break
            said += part
        os.close(reader)
    while (ended := os.waitpid(pid, os.WNOHANG))[0] == 0:
        if time.monotonic() > until:
            os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)
    return os.waitstatus_to_exitcode(ended[1]), said.decode(errors="replace")


def _become_command(command: Callable[[], None], writer: int, limit: int | None) -> None:
    """Run a command in this process, which ends with it."""
    status = 1
    try:
        os.dup2(writer, 1)
        os.dup2(writer, 2)
        os.close(writer)
        signal.signal(signal.SIGPIPE, signal.SIG_IGN)
        sys.stdout, sys.stderr = (open(number, "w", buffering=1, closefd=False) for number in (1, 2))  # noqa: SIM115
        torch.set_num_threads(1)
        if limit is not None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
        command()
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else 1
    except BaseException:  # noqa: BLE001 - the process ends here, and not in what the fork copied
        traceback.print_exc()
    finally:
        os._exit(status)
