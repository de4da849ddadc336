"""A disk that is full, for tests: no file of this process can grow any more."""

import resource
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def largest_file(size_bytes: int | None) -> Iterator[None]:
    """Writing beyond fails as on a full disk; None: no limit."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        if size_bytes is not None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, before[1]))
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
