"""Text for language models, which is encoded as tokens once and stored in a token folder.

Files with equal content are used once. A hash of the content assigns each file to training or validation, and decides
the order of files, so that neighbouring files are unrelated. Byte-pair encoding needs the package `tokenizers` (the
extra `text`); reading a token folder does not.

A token folder holds `tokens.json` (the manifest), `tokenizer.json`, `training.xz` and `validation.xz` (16-bit numbers).
"""

import hashlib
import lzma
import math
import os
import sysconfig
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from jpmhc import checks
from jpmhc.experiments.tasks import counter
from jpmhc.files import read_json, write_json

PYTHON_SUFFIXES = (".py",)  # files that are read if no folder is named
SUFFIXES = (".md", ".py", ".rst", ".tex", ".txt")  # files that are read in named folders
LARGEST_VOCABULARY = 2**15  # a token fits into a signed 16-bit number
VALIDATION_SHARE = 0.05
_SKIPPED = ("__pycache__", "site-packages")  # compiled files, and packages below a folder that is not theirs
_FILE_BYTES = (100, 250_000)  # smallest and largest file; larger ones are mostly tables
_TOKENIZER_BYTES = 40_000_000  # amount of text from which the vocabulary is learned
_BYTES_PER_WORD = 1000  # training bytes per word of the vocabulary, for small texts
_PART = 4_000_000  # tokens that one thread compresses
_SEPARATOR = "<|file|>"  # token 0, before every file
_ROWS = 301  # a word of the random numbers' keys
# Settings for 16-bit numbers, where the parity of a byte's position is useful context.
_FILTERS = [{"id": lzma.FILTER_LZMA2, "preset": 6, "lc": 3, "lp": 1, "pb": 1}]


@dataclass(frozen=True)
class Manifest:
    """The description of a token folder."""

    fingerprint: str  # equal fingerprints mean equal tokens
    vocabulary: int
    training: int  # number of training tokens
    validation: int  # number of validation tokens
    bytes: int  # size of the encoded text
    files: int
    sources: tuple[str, ...]  # names of the folders
    tokenizers: str  # version of the package


@dataclass(frozen=True)
class Tokens:
    """The training and validation tokens of a token folder."""

    manifest: Manifest
    training: Tensor  # [tokens] int16
    validation: Tensor  # [tokens] int16

    def count_rows(self, length: int) -> int:
        """Return the number of non-overlapping training rows of `length` tokens."""
        return (len(self.training) - 1) // length

    def validation_rows(self, count: int, length: int) -> Tensor:
        """Return the index of the first token of each of at most `count` validation rows of `length` tokens. [rows]

        The rows are evenly spread and do not overlap.
        """
        available = (len(self.validation) - 1) // length
        chosen = np.linspace(0, available - 1, min(count, available)).astype(np.int64)
        return torch.from_numpy(chosen * length)


def draw_rows(available: int, needed: int, length: int, seed: int) -> Tensor:
    """Return the index of the first token of each of `needed` training rows of `length` tokens. [needed]

    Every epoch has all `available` rows in another random order, which `seed` determines.

    >>> sorted(draw_rows(available=4, needed=4, length=10, seed=0).tolist())
    [0, 10, 20, 30]
    """
    epochs = [counter.shuffled(available, seed, _ROWS, epoch) for epoch in range(math.ceil(needed / available))]
    return torch.from_numpy(np.concatenate(epochs)[:needed] * length)


def refuse_second_reading(available: int, steps: int, batch: int, length: int, epochs: int) -> None:
    """Raise a ValueError if training would read the `available` rows of tokens more than `epochs` times."""
    needed = steps * batch
    if available < 1 or needed > epochs * available:
        times = "" if available < 1 else f", so training would read them {needed / available:.2f} times"
        advice = f"; --epochs {math.ceil(needed / available)} allows this" if available else ""
        raise ValueError(
            f"{steps} steps of {batch} rows need {needed:,} rows of {length} tokens, and the text has "
            f"{available:,}{times}: take more --text or fewer --steps{advice}"
        )


def cut_rows(tokens: Tensor, starts: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """Return the rows that begin at the token indices `starts` [B], and as labels the next tokens. [B, length] each"""
    row = tokens[starts[:, None] + torch.arange(length + 1, device=tokens.device)].long()
    return row[:, :-1], row[:, 1:]


def prepare_tokens(
    folders: Sequence[Path] = (),  # with text, or one token folder; empty: the Python source of this environment
    cache: Path = Path("out/tokens"),  # in which token folders are created
    *,
    vocabulary: int | None = None,  # number of different tokens; None: 16,384, or fewer for a small text
    limit: int | None = None,  # stop after about this many tokens
    say: Callable[[str], None] = lambda line: None,  # called with a line before text is read, which may take minutes
) -> Path:
    """Return the token folder of the text in `folders`; encode the text if `cache` has no such token folder yet."""
    for folder in folders:
        if not folder.is_dir():
            raise ValueError(f"{folder} is no folder: --text takes folders with text, or one token folder")
    if len(folders) == 1 and (folders[0] / "tokens.json").exists():
        return folders[0]
    sources = tuple(folders) or (Path(sysconfig.get_paths()["stdlib"]), Path(sysconfig.get_paths()["purelib"]))
    suffixes = SUFFIXES if folders else PYTHON_SUFFIXES
    if vocabulary is not None:
        checks.whole_number(vocabulary, "vocabulary", 300)
        checks.inside(vocabulary, f"[300, {LARGEST_VOCABULARY}]", "vocabulary")
    say(f"reading the text in {', '.join(map(str, sources))}")
    texts = dict(sorted(read_files(sources, suffixes)))
    if len(texts) < 2:
        raise ValueError(
            f"{', '.join(map(str, sources))}: training and validation need two different files of text at least, and "
            f"there are {len(texts)} (files end in {' '.join(suffixes)})"
        )
    held_out = _choose_validation(texts)
    training = sum(len(text) for key, text in texts.items() if key not in held_out)
    size = vocabulary or min(2**14, max(512, 2 ** round(math.log2(training / _BYTES_PER_WORD))))
    key = hashlib.blake2b(repr((list(texts), size, limit)).encode(), digest_size=8).hexdigest()
    folder = cache / key
    if not (folder / "tokens.json").exists():
        _encode(texts, size, limit, tuple(source.name for source in sources), folder)
    return folder


def read_files(folders: Sequence[Path], suffixes: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield the hash of the content and the text of every UTF-8 file with one of the suffixes and an allowed size.

    Of files with equal content, only the first is used.
    """
    seen = set()
    for folder in folders:
        for parent, children, names in os.walk(folder):
            children[:] = sorted(child for child in children if not child.startswith(".") and child not in _SKIPPED)
            for name in sorted(names):
                if not name.endswith(tuple(suffixes)):
                    continue
                content = Path(parent, name).read_bytes()
                key = hashlib.blake2b(content, digest_size=16).hexdigest()
                if not _FILE_BYTES[0] <= len(content) <= _FILE_BYTES[1] or key in seen:
                    continue
                seen.add(key)
                try:
                    yield key, content.decode()
                except UnicodeDecodeError:
                    continue


def _choose_validation(keys: Collection[str]) -> set[str]:
    """Return the hashes of the validation files: all hashes below a limit, but at least one file, and not all files."""
    ordered = sorted(keys, key=lambda key: key[-8:])
    below = sum(int(key[-8:], 16) < VALIDATION_SHARE * 2**32 for key in ordered)
    return set(ordered[: min(max(below, 1), len(ordered) - 1)])


def _encode(texts: dict[str, str], vocabulary: int, limit: int | None, sources: tuple[str, ...], folder: Path) -> None:
    """Learn a vocabulary from the training text, encode the files in `texts` (hash: text), and write the token folder.

    `limit` is about the largest number of tokens (None: no limit), `sources` are the folders' names for the manifest.
    """
    import tokenizers
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[_SEPARATOR],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    held_out = _choose_validation(texts)
    tokenizer.train_from_iterator(_first_bytes(text for key, text in texts.items() if key not in held_out), trainer)
    sides: tuple[list[np.ndarray], list[np.ndarray]] = ([], [])
    count, files, length = 0, 0, 0
    keys = list(texts)
    for first in range(0, len(keys), 512):
        if limit is not None and count >= limit:
            break
        part = keys[first : first + 512]
        for key, encoding in zip(part, tokenizer.encode_batch_fast([texts[key] for key in part])):
            row = np.array([0, *encoding.ids], dtype="<u2")
            sides[key in held_out].append(row)
            count, files, length = count + len(row), files + 1, length + len(texts[key].encode())
    training, validation = (np.concatenate(side) for side in sides)
    digest = hashlib.blake2b(training.tobytes(), digest_size=12)
    digest.update(validation.tobytes())
    folder.mkdir(parents=True, exist_ok=True)
    for name, values in (("training", training), ("validation", validation)):
        _write_compressed(folder / f"{name}.xz", values)
    tokenizer.save(str(folder / "tokenizer.json"))
    manifest = Manifest(
        digest.hexdigest(),
        tokenizer.get_vocab_size(),
        len(training),
        len(validation),
        length,
        files,
        sources,
        tokenizers.__version__,
    )
    write_json(folder / "tokens.json", asdict(manifest), indent=2)  # last: marks a complete folder


def _first_bytes(texts: Iterable[str]) -> Iterator[str]:
    """Yield training files until they have enough text to learn the vocabulary from."""
    length = 0
    for text in texts:
        yield text
        length += len(text)
        if length > _TOKENIZER_BYTES:
            return


def _write_compressed(path: Path, values: np.ndarray) -> None:
    """Write an array into an xz file, compressed in parts by parallel threads."""
    parts = [values[first : first + _PART].tobytes() for first in range(0, len(values), _PART)]
    with ThreadPoolExecutor(os.cpu_count()) as pool, open(path, "wb") as file:
        file.writelines(pool.map(lambda part: lzma.compress(part, lzma.FORMAT_XZ, filters=_FILTERS), parts))


def read_manifest(folder: Path) -> Manifest:
    """Read the description of a token folder."""
    path = folder / "tokens.json"
    fields = read_json(path)
    try:
        return Manifest(**{**fields, "sources": tuple(fields["sources"])})
    except (TypeError, KeyError) as fault:
        raise ValueError(f"{path} is damaged ({fault}): remove the folder") from None


def read_tokens(folder: Path) -> Tokens:
    """Read a token folder; raise a ValueError if its tokens do not match its manifest."""
    manifest = read_manifest(folder)
    digest = hashlib.blake2b(digest_size=12)
    sides = []
    for name in ("training", "validation"):
        content = lzma.decompress((folder / f"{name}.xz").read_bytes())
        digest.update(content)
        sides.append(torch.from_numpy(np.frombuffer(bytearray(content), dtype="<i2")))
    if digest.hexdigest() != manifest.fingerprint:
        raise ValueError(f"{folder} does not hold the tokens of its manifest: remove the folder")
    return Tokens(manifest, *sides)
