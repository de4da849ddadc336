"""Names of a launch's semaphores, by which a later one can tell that nobody needs them any more.

Torch elastic's queues, and those of joblib's processes (loky), are made of named semaphores, files in /dev/shm. A
launch, or a sweep, removes its own, unless all of its processes are killed at once: then they would stay until the
machine restarts.
"""

from __future__ import annotations

import hashlib
import multiprocessing
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_FOLDER = Path("/dev/shm")
_BEGIN = "torpor"


@contextmanager
def own_names() -> Iterator[None]:
    """Semaphores that this process and its children make inside bear its name; those of processes that are gone are
    removed first."""
    clear()
    config = multiprocessing.current_process()._config  # type: ignore[attr-defined]  # what children inherit
    before = config["semprefix"]
    config["semprefix"] = _prefix()
    try:
        yield
    finally:
        config["semprefix"] = before


def own_names_of_loky() -> None:
    """The same for the semaphores that joblib's loky makes in this process from now on."""
    from joblib.externals.loky.backend.synchronize import SemLock  # an extra

    clear()
    SemLock._make_name = staticmethod(lambda: f"{_prefix()}-{next(SemLock._rand)}")


def _prefix() -> str:
    return f"/{_BEGIN}-{_namespace()}-{os.getpid()}-{_start_of(os.getpid())}"


def clear() -> None:
    """Remove the semaphores of processes that are gone. Those of other users cannot be removed, and those of another
    container that shares /dev/shm are not judged: its process numbers mean other processes."""
    for path in _FOLDER.glob(f"sem.{_BEGIN}-{_namespace()}-*"):
        _, _, pid, start, _ = path.name.split("-", 4)
        if start != _start_of(int(pid)):
            with suppress(OSError):
                path.unlink()


def _namespace() -> str:
    """What process numbers refer to: eight hex digits."""
    name = "unknown"
    with suppress(OSError):
        name = os.readlink("/proc/self/ns/pid")
    return hashlib.sha256(name.encode()).hexdigest()[:8]


def _start_of(pid: int) -> str | None:
    """When the process started, in ticks since the machine did; None if there is none. A number may be given again."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    return text.rpartition(")")[2].split()[19]
