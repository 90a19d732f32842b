"""What a run was started with, beside its configuration: versions, commit, command and device."""

import platform
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from jpmhc import __version__
from jpmhc.experiments.training.processes import World


def describe_environment(world: World) -> dict[str, Any]:
    """Return what the log records when a process begins to train."""
    gpu = world.device.type == "cuda"
    return {
        "jpmhc": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "commit": find_commit(Path(__file__).parents[2]),
        "command": shlex.join(sys.argv),
        "device": torch.cuda.get_device_name(world.device) if gpu else "cpu",
        "processes": world.size,
    }


def find_commit(folder: Path) -> str | None:
    """Return the commit that a folder of source is at, with a plus where it was changed since; None without git."""
    if shutil.which("git") is None:
        return None

    def ask(*words: str) -> str:
        return subprocess.run(["git", *words], cwd=folder, capture_output=True, text=True).stdout.strip()

    if not ask("ls-files", "__init__.py"):
        return None  # not under version control, or installed inside somebody else's repository
    changed = ask("status", "--porcelain", "--untracked-files=no", ".")
    return ask("rev-parse", "--short=12", "HEAD") + ("+" if changed else "")
