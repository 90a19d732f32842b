"""How many threads small matrices are worth."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def one_thread() -> Iterator[None]:
    """Compute with one thread inside the context, and with the user's number of threads again after it.

    Batches of matrices of a few rows gain little from a second thread. Where the cores are shared with other work they
    lose much: threads that wait for each other spin (docs/LOG.md has the times).
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
