"""A full disk, for what writes files."""

import contextlib
import resource
from collections.abc import Iterator


@contextlib.contextmanager
def full_disk(size: int) -> Iterator[None]:
    """Let no file of this process grow beyond `size` bytes: writing more fails as it does on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
