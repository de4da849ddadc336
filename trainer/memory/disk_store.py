"""A store on a local disk (``optim_keeper=disk``): a file without a name, written and read with direct I/O.

Direct I/O passes the page cache, so no host memory is used behind anybody's back. Bytes go through a few page-locked
buffers: while the disk works on one, the device copies to or from others. The file never has a name (O_TMPFILE), so
whatever ends the process frees it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import accumulate
from pathlib import Path
from queue import SimpleQueue

import torch

from trainer.common.multiples import round_up
from trainer.memory.arena import HostArena
from trainer.memory.keeper import Wait
from trainer.plan.keepers import DISK_BUFFER_BYTES, DISK_BUFFERS

_SECTOR_BYTES = 4096  # direct I/O wants addresses, offsets and sizes that are multiples of the disk's sectors


def round_up_to_sector(size_bytes: int) -> int:
    return round_up(size_bytes, _SECTOR_BYTES)


class DiskStore:
    """Keeps pieces in a file in ``directory``, whose space is allocated here.

    Args:
        arena: of :attr:`buffer_bytes`, for the buffers.

    Raises:
        OSError: the disk has too little space, or does not do direct I/O.
    """

    buffer_bytes = DISK_BUFFERS * DISK_BUFFER_BYTES

    def __init__(self, pieces: Sequence[torch.Tensor], directory: Path, *, arena: HostArena) -> None:
        sizes = [round_up_to_sector(piece.nbytes) for piece in pieces]
        self._starts = [0, *accumulate(sizes)]
        self._file = os.open(directory, os.O_TMPFILE | os.O_RDWR | os.O_DIRECT, 0o600)
        if self._starts[-1]:
            os.posix_fallocate(self._file, 0, self._starts[-1])
        self._arena = arena
        self._buffers: SimpleQueue[torch.Tensor] = SimpleQueue()
        for buffer in self._arena.whole.split(DISK_BUFFER_BYTES):
            self._buffers.put(buffer)
        device = torch.cuda.current_device()
        self._disk = ThreadPoolExecutor(
            DISK_BUFFERS, thread_name_prefix="disk", initializer=torch.cuda.set_device, initargs=(device,)
        )

    @property
    def host_bytes(self) -> int:
        return self._arena.size_bytes

    @property
    def disk_bytes(self) -> int:
        """Size of the file."""
        return self._starts[-1]

    def start_write(self, number: int, piece: torch.Tensor) -> Wait:
        self._arena.wait_until_ready()

        def write(part: torch.Tensor, offset: int) -> Future[None]:
            buffer = self._buffers.get()
            copied = _start_copy(buffer[: part.numel()], part)
            return self._disk.submit(self._write, buffer, copied, round_up_to_sector(part.numel()), offset)

        return self._for_each_part(number, piece, write)

    def start_read(self, number: int, piece: torch.Tensor) -> Wait:
        self._arena.wait_until_ready()
        stream = torch.cuda.current_stream()

        def read(part: torch.Tensor, offset: int) -> Future[None]:
            return self._disk.submit(self._read, self._buffers.get(), part, offset, stream)

        return self._for_each_part(number, piece, read)

    def host_tensor(self, number: int) -> torch.Tensor | None:
        return None

    def _for_each_part(
        self, number: int, piece: torch.Tensor, start: Callable[[torch.Tensor, int], Future[None]]
    ) -> Wait:
        parts = piece.view(torch.uint8).split(DISK_BUFFER_BYTES) if piece.numel() else ()
        begun = [start(part, self._starts[number] + place * DISK_BUFFER_BYTES) for place, part in enumerate(parts)]
        return lambda: [one.result() for one in begun]

    def _write(self, buffer: torch.Tensor, copied: torch.cuda.Event, size: int, offset: int) -> None:
        try:
            copied.synchronize()
            _whole(os.pwrite, self._file, buffer.numpy().data[:size], offset)
        finally:
            self._buffers.put(buffer)

    def _read(self, buffer: torch.Tensor, part: torch.Tensor, offset: int, stream: torch.cuda.Stream) -> None:
        try:
            size = round_up_to_sector(part.numel())
            _whole(_preadv, self._file, buffer.numpy().data[:size], offset)
            with torch.cuda.stream(stream):
                _start_copy(part, buffer[: part.numel()]).synchronize()
        finally:
            self._buffers.put(buffer)

    def __del__(self) -> None:
        if hasattr(self, "_file"):
            os.close(self._file)


def _preadv(file: int, view: memoryview, offset: int) -> int:
    return os.preadv(file, [view], offset)


def _whole(call: Callable[[int, memoryview, int], int], file: int, view: memoryview, offset: int) -> None:
    """Repeat ``call`` until it has done all bytes of ``view``."""
    done = 0
    while done < len(view):
        count = call(file, view[done:], offset + done)
        if count == 0:
            raise OSError(f"the file ended {len(view) - done} bytes early")
        done += count


def _start_copy(target: torch.Tensor, source: torch.Tensor) -> torch.cuda.Event:
    target.copy_(source, non_blocking=True)
    done = torch.cuda.Event()
    done.record()
    return done
