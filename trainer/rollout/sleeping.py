"""How an engine's regions fall asleep and wake up, and what is recorded of it."""

from __future__ import annotations

import time

from trainer.memory.regions import MemoryObserver
from trainer.memory.saver import Saver


def fall_asleep(tag: str, saver: Saver, observer: MemoryObserver) -> None:
    """Release the region ``engine/<kind>``, whose bytes are lost; one that is asleep stays so."""
    if not saver.is_asleep(tag):
        _move(tag, "asleep", saver, observer)


def wake_up(tag: str, saver: Saver, observer: MemoryObserver) -> None:
    """Map it again, where it is asleep."""
    if saver.is_asleep(tag):
        _move(tag, "awake", saver, observer)


def _move(tag: str, state: str, saver: Saver, observer: MemoryObserver) -> None:
    start = time.perf_counter()
    sizes = saver.sleep(tag) if state == "asleep" else saver.wake_up(tag)
    if saver.sleeps:
        observer(
            {
                "role": "engine",
                "kind": tag.removeprefix("engine/"),
                "state": state,
                "flag": None,
                "keeper": "none",
                "released_bytes": sizes.released_bytes,
                "backup_bytes": sizes.backup_bytes,
                "seconds": time.perf_counter() - start,
            }
        )
