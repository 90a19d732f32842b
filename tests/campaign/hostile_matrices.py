"""Matrix files for `jpmhc spectrum` that are torn, mistyped, pickled or sparse: read rightly, or refused in a line."""

import io
import pickle
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch

from jpmhc.cli.spectrum import read_skips
from tests.campaign.hostile_tasks import make_value, spoil_bytes
from tests.campaign.refusals import find_fault
from tests.campaign.tally import Tally

ROUND = 1000


class Code:
    """An object whose unpickling would make a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> Any:
        return Path.mkdir, (self.folder,)


def run(rng: np.random.Generator, size: int) -> Tally:
    """Write `size` matrix files and read them."""
    tally = Tally()
    with tempfile.TemporaryDirectory() as name:
        made = Path(name) / "made"
        for _ in range(size):
            ending = ("npy", "pt", "csv", "txt")[rng.integers(4)]
            path = Path(name) / f"matrix.{ending}"
            written = write_held(rng, make_held(rng, made), ending)
            if rng.integers(2):
                written = spoil_bytes(rng, written)
            path.write_bytes(written)
            found, fault = find_fault(lambda path=path: read_skips(path), str(path))
            if made.exists():
                fault = "the file ran code"
                made.rmdir()
            if found is not None and not fault:
                fine = found.ndim == 3 and found.dtype == torch.float64 and bool(torch.isfinite(found).all())
                fault = None if fine else f"{found.dtype} {list(found.shape)} was read"
            if fault:
                tally.fail(f"{fault}; {ending} that begins with {written[:80]!r}")
            else:
                tally.hold()
    return tally


def make_held(rng: np.random.Generator, made: Path) -> Any:
    """Make what a file is to hold: a matrix, or something that is none."""
    shape = tuple(int(n) for n in rng.integers(0, 4, rng.integers(0, 5)))
    array = rng.normal(size=shape) * 10.0 ** rng.integers(-300, 300)
    dtypes = ("f2", "f4", "f8", "i1", "i8", "u2", "c8", "c16", "?", "U3", "S4", "M8[s]", "f16", "O", [("a", "f4")])
    square = rng.normal(size=(3, 3))
    tensor = torch.from_numpy(square)
    held = (
        *(square, np.stack([square] * 2), array, np.full((2, 2), [np.nan, np.inf][rng.integers(2)]), make_value(rng)),
        *(np.zeros((2, 2), dtypes[rng.integers(len(dtypes))]), np.asfortranarray(square)[::-1], {"skip": square}),
        *(tensor, tensor.to_sparse(), tensor.to_sparse_csr(), tensor.to(torch.bfloat16), tensor.to(torch.complex64)),
        *(tensor.to("meta"), torch.nested.nested_tensor([tensor[0], tensor[1][:2]]), [tensor], torch.nn.Linear(3, 3)),
        *(torch.quantize_per_tensor(tensor.float(), 0.1, 0, torch.qint8), tensor > 0, Code(made)),
    )
    return held[rng.integers(len(held))]


def write_held(rng: np.random.Generator, held: Any, ending: str) -> bytes:
    """Write something as a file of that ending, as well as it can be."""
    file = io.BytesIO()
    try:
        if ending == "npy":
            np.save(file, held.numpy() if isinstance(held, torch.Tensor) else held, allow_pickle=True)
        elif ending == "pt":
            torch.save(held, file, _use_new_zipfile_serialization=bool(rng.integers(4)))
        else:
            rows = np.atleast_2d(np.asarray(held))
            file.write("\n".join(",; "[rng.integers(3)].join(map(str, row)) for row in rows[:50]).encode())
    except (TypeError, ValueError, RuntimeError, AttributeError, OverflowError):
        return pickle.dumps(repr(held)[:5000])
    return file.getvalue() or b" "
