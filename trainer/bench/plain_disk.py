"""How fast the disk under ``memory.disk.path`` is without us: plain direct writes and reads of as many bytes."""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from trainer.plan.keepers import DISK_BUFFER_BYTES, DISK_BUFFERS

_REPEATS = 3


def plain_disk_rates(directory: Path, size_bytes: int) -> dict[str, float]:
    """Bytes per second of writing ``size_bytes`` (``to_host``) and of reading them (``to_device``), the best of some:
    a file without a name, direct I/O, as many requests of the same size at once as the keeper makes.

    Raises:
        OSError: the disk has too little space, or does not do direct I/O.
    """
    offsets = range(0, max(size_bytes, 1), DISK_BUFFER_BYTES)
    file = os.open(directory, os.O_TMPFILE | os.O_RDWR | os.O_DIRECT, 0o600)
    buffers = [mmap.mmap(-1, DISK_BUFFER_BYTES) for _ in range(DISK_BUFFERS)]  # aligned, as direct I/O wants it
    try:
        os.posix_fallocate(file, 0, len(offsets) * DISK_BUFFER_BYTES)
        calls = {"to_host": os.pwrite, "to_device": lambda f, buffer, offset: os.preadv(f, [buffer], offset)}

        def seconds(call: Callable[[int, mmap.mmap, int], int]) -> float:
            def share(first: int) -> None:
                for offset in offsets[first::DISK_BUFFERS]:
                    if call(file, buffers[first], offset) != DISK_BUFFER_BYTES:
                        raise OSError(f"a direct request of {DISK_BUFFER_BYTES} bytes in {directory} was cut short")

            start = time.perf_counter()
            list(pool.map(share, range(DISK_BUFFERS)))
            return time.perf_counter() - start

        with ThreadPoolExecutor(DISK_BUFFERS) as pool:
            best = {name: min(seconds(call) for _ in range(_REPEATS)) for name, call in calls.items()}
        return {name: len(offsets) * DISK_BUFFER_BYTES / took for name, took in best.items()}
    finally:
        os.close(file)
