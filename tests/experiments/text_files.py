"""A small text for language models, encoded once per test run."""

import functools
import tempfile
from pathlib import Path

from jpmhc.experiments.tasks.language import prepare_tokens


def write_files(folder: Path, count: int = 120) -> Path:
    """Write files of a few hundred bytes that a model can learn."""
    for k in range(count):
        lines = (f"def function_{k}(x, y={k % 7}):\n    return x * {k % 5} + y\n" for _ in range(12))
        (folder / f"m{k:03}.py").write_text(f"# file {k}\n" + "\n".join(lines))
    return folder


@functools.cache
def make_token_folder() -> Path:
    """Return a token folder of 300 words and some 30,000 tokens."""
    folder = Path(tempfile.mkdtemp())
    (folder / "text").mkdir()
    return prepare_tokens((write_files(folder / "text"),), folder / "tokens", vocabulary=300)
