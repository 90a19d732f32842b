"""How many threads small matrices are worth."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def use_threads(count: int | None) -> Iterator[None]:
    """Compute with so many threads inside the context (None: as many as before), and with the user's number after it.

    Batches of matrices of a few rows gain little from a second thread. Where the cores are shared with other work they
    lose much: threads that wait for each other spin (docs/LOG.md has the times).
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(threads if count is None else count)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


@contextmanager
def one_thread() -> Iterator[None]:
    """Compute with one thread inside the context."""
    with use_threads(1):
        yield
