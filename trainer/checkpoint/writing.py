"""How ranks write a checkpoint together, at once or in the background.

After each part of a save the ranks agree whether it went well everywhere, so a disk that refuses one of them stops all.
They agree through a gloo group of their own: in the background, since collectives of two threads in one group would
mix; at once, since NCCL would take GPU memory that no sleep gives back.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

from torch import distributed

from trainer.checkpoint import folder
from trainer.checkpoint.manifest import SavedFile

SLOWEST_DISK = timedelta(hours=2)  # how long ranks wait for one another's disks


def group_of_writers() -> distributed.ProcessGroup:
    """A gloo group of all ranks. Collective."""
    return distributed.new_group(backend="gloo", timeout=SLOWEST_DISK)  # type: ignore[return-value]


def write_bytes(directory: Path, files: Mapping[str, bytes], *, checksums: bool) -> dict[str, SavedFile]:
    """Write files given as name (with folders) -> content, on disk when this returns."""
    for name, content in files.items():
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
        folder.sync(path)
        folder.sync(path.parent)
    return {
        name: SavedFile(len(content), hashlib.sha256(content).hexdigest() if checksums else None)
        for name, content in files.items()
    }


class SaveError(Exception):
    """A rank could not write; raised on all ranks alike."""


def on_every_rank(action: Callable[[], Any], *, group: distributed.ProcessGroup | None = None) -> list[Any]:
    """The results of all ranks. Raises SaveError on every rank if the disk refused one of them."""
    result = error = None
    try:
        result = action()
    except OSError as cause:
        error = f"rank {distributed.get_rank()}: {cause}"
    outcomes: list[Any] = [None] * distributed.get_world_size()
    distributed.all_gather_object(outcomes, (result, error), group=group)
    for _, failure in outcomes:
        if failure is not None:
            raise SaveError(failure)
    return [outcome for outcome, _ in outcomes]


def on_rank_0(action: Callable[[], Any], *, group: distributed.ProcessGroup | None = None) -> Any:
    """What rank 0's ``action`` returned, on every rank. Raises SaveError likewise."""
    return on_every_rank(lambda: action() if distributed.get_rank() == 0 else None, group=group)[0]


class BackgroundWriter:
    """Runs one save at a time in a thread."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._under_way: Future[None] | None = None

    def start(self, write: Callable[[], None]) -> None:
        """Begin ``write``, which alone may use its group's collectives; :meth:`finish` must have been called."""
        assert self._under_way is None
        self._under_way = self._pool.submit(write)

    def finish(self) -> None:
        """Wait for what was started, if anything; its exception is raised here."""
        if self._under_way is not None:
            under_way, self._under_way = self._under_way, None
            under_way.result()
