"""Text that every Python has: the source of its standard library, as bytes.

Files are taken in the order of their names and split whole: a file belongs to training or to validation by a hash of
its name. A batch is a pure function of (seed, step), so that every model sees the same bytes in the same order.
"""

import functools
import hashlib
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from jpmhc.experiments.tasks import counter

VOCABULARY = 256
# Folders that not every installation has, hold tests or mere tables, or come from elsewhere.
_LEFT_OUT = {
    "dist-packages",
    "encodings",
    "ensurepip",
    "idlelib",
    "lib-dynload",
    "lib2to3",
    "pydoc_data",
    "site-packages",
    "test",
    "tests",
    "turtledemo",
}
_VALIDATION_SHARE = 0.1
_WINDOW = 300  # purpose of a draw, part of its key


@dataclass(frozen=True)
class Text:
    """The training and the validation bytes."""

    training: Tensor  # [bytes] uint8
    validation: Tensor  # [bytes] uint8

    @property
    def fingerprint(self) -> str:
        """A short digest: equal digests mean equal bytes."""
        digest = hashlib.blake2b(self.training.numpy().tobytes(), digest_size=12)
        digest.update(self.validation.numpy().tobytes())
        return digest.hexdigest()

    def draw_starts(self, seed: int, steps: int, batch: int, length: int) -> Tensor:
        """Draw where the training windows of every step begin. [steps, batch]"""
        rows = np.arange(batch)
        room = len(self.training) - length
        return torch.from_numpy(counter.below(room, seed, _WINDOW, np.arange(steps)[:, None], rows))

    def list_validation_starts(self, windows: int, length: int) -> Tensor:
        """Return where windows begin that cover the validation bytes evenly and do not overlap. [windows or fewer]"""
        room = (len(self.validation) - 1) // length
        chosen = np.linspace(0, room - 1, min(windows, room)).astype(np.int64)
        return torch.from_numpy(chosen * length)


def cut_windows(text: Tensor, starts: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """Return the bytes of each window and the byte after each of them. [B] → twice [B, length] int64"""
    at = starts[:, None] + torch.arange(length + 1, device=text.device)
    window = text[at].long()
    return window[:, :-1], window[:, 1:]


@functools.cache
def read_library() -> Text:
    """Read the standard library of the Python that runs this; about 10 MB in half a second, kept for the next call."""
    return read_sources(Path(sysconfig.get_paths()["stdlib"]))


def read_sources(folder: Path) -> Text:
    """Read the Python files below a folder, with a zero byte after each."""
    training: list[bytes] = []
    validation: list[bytes] = []
    for path in sorted(folder.rglob("*.py"), key=lambda path: path.relative_to(folder).as_posix()):
        name = path.relative_to(folder)
        if not _LEFT_OUT.intersection(name.parts):
            held_out = counter.uniform(counter.key_of(name.as_posix())) < _VALIDATION_SHARE
            (validation if held_out else training).append(path.read_bytes() + b"\0")
    if not training or not validation:
        raise ValueError(f"{folder} holds too few Python files to train on some and validate on others")
    parts = (torch.frombuffer(bytearray(b"".join(files)), dtype=torch.uint8) for files in (training, validation))
    return Text(*parts)
