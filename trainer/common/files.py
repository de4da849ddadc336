"""Files of a run that are complete or as they were before, and errors that say which file could not be written."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


class UnwritableFile(OSError):
    """The disk is full, or refuses for another reason. One line that names the file, which Python's error of a write
    does not."""


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Raise :class:`UnwritableFile` about ``path`` for what the system refuses inside."""
    try:
        yield
    except OSError as error:
        raise UnwritableFile(f"cannot write {path}: {error.strerror or error}") from error


def sync(path: Path) -> None:
    """Wait until a file or a folder's list of names is on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # file systems that know no such thing of folders
            raise
    finally:
        os.close(descriptor)


def write_whole(path: Path, content: str | bytes) -> None:
    """Write a file in one go, on disk when this returns; what cannot be encoded is escaped.

    Raises:
        UnwritableFile: it could not be written; one of that name is as it was before.
    """
    unfinished = path.with_name(f"{path.name}.tmp")
    try:
        with naming(path):
            unfinished.write_bytes(content if isinstance(content, bytes) else content.encode(errors="backslashreplace"))
            sync(unfinished)  # before it has the name: a power cut must not leave an empty file of that name
            os.replace(unfinished, path)
            sync(path.parent)
    except UnwritableFile:
        with suppress(OSError):
            unfinished.unlink()
        raise
