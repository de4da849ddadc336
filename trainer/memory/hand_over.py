"""Hands the device from some optimizer states to another one, piece by piece, beside other work.

While pieces of the ones are copied to their keeper, pieces of the other are copied to the device, so that both
directions of the bus are in use. A piece is mapped only once there is room for it: those that leave make it. From the
start the ones count as asleep and the other as awake; whoever needs either waits (:meth:`HandOver.settle`).
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future
from threading import Condition
from typing import TYPE_CHECKING

import torch

from trainer.memory.arena import RegionBytes

if TYPE_CHECKING:
    from trainer.memory.regions import RoleRegions

_IN_FLIGHT = 4  # pieces on the bus each way: enough to keep it busy, few for whoever waits for all the device's work


class HandOver:
    """One of them. Nothing may be queued on the device that still works with the states.

    Args:
        room_bytes: what the states may hold together, of both sides.
        retry: wakes up the state that comes, where mapping it has met a MemoryError and all are asleep.
    """

    def __init__(
        self, going: Sequence[RoleRegions], coming: RoleRegions, *, room_bytes: int, retry: Callable[[], None]
    ) -> None:
        self._going, self._coming, self._retry = tuple(going), coming, retry
        self._leaving = deque((regions, piece) for regions in going for piece in regions.state_pieces(asleep=False))
        self._to_map = coming.state_pieces(asleep=True)
        self._held_bytes = sum(regions.piece_bytes(piece) for regions, piece in self._leaving)
        self._held_bytes += sum(coming.piece_bytes(piece) for piece in coming.state_pieces(asleep=False))
        self._room_bytes, self._is_room_final = room_bytes, False
        self._sizes = {regions: RegionBytes(0, 0) for regions in (*going, coming)}
        self._changed, self._mapped, self._has_ended = Condition(), 0, False
        self._waited_seconds = 0.0
        self._work: Future[None] | None = None

    def start(self, thread: Executor, stream: torch.cuda.Stream) -> None:
        """Begin in ``thread``, with ``stream`` as its own: no copy waits for what others queue."""
        for regions in (*self._going, self._coming):
            regions.hand_over = self
        self._work = thread.submit(self._run, torch.cuda.current_device(), stream)

    def give_room(self, size_bytes: int) -> None:
        """Others have let go of so much, and no more will follow. Blocks until all fits that is to be mapped beside
        the states."""
        start = time.perf_counter()
        with self._changed:
            self._room_bytes, self._is_room_final = self._room_bytes + size_bytes, True
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._has_ended or self._held_bytes <= self._room_bytes)
        self._waited_seconds += time.perf_counter() - start

    def goes(self, regions: RoleRegions) -> bool:
        """Whether its state is one of those that leave."""
        return regions in self._going

    def wait_for_pieces(self, count: int) -> None:
        """Block until so many pieces of what comes, the first ones, are mapped and on their way."""
        start = time.perf_counter()
        with self._changed:
            self._changed.wait_for(lambda: self._has_ended or self._mapped >= count)
        self._waited_seconds += time.perf_counter() - start
        if self._has_ended:
            self.settle()

    def settle(self) -> None:
        """Block until the ones are asleep and the other is mapped, its copies on their way. Once.

        Raises:
            MemoryError: there is no room, and ``retry`` finds none either. All of the states are asleep.
            RuntimeError: a keeper could not copy. What it has not kept is awake, and all else is asleep.
        """
        if self._coming.hand_over is not self:
            return
        assert self._work is not None
        start = time.perf_counter()
        error = self._work.exception()
        for regions in (*self._going, self._coming):
            regions.hand_over = None
        if error is not None:
            self._undo()
        seconds = self._waited_seconds + time.perf_counter() - start
        if error is None:
            self._coming.record_state("awake", self._sizes[self._coming], seconds=seconds)
        for regions in self._going:
            regions.record_state("asleep", self._sizes[regions], seconds=0.0)
        if isinstance(error, MemoryError):
            self._retry()
        elif error is not None:
            names = ", ".join(regions.role for regions in self._going)
            raise RuntimeError(
                f"the optimizer state of {names} could not make room for that of {self._coming.role}: {error}"
            ) from error

    # ---- in the thread -------------------------------------------------------------------------------------------

    def _run(self, device: int, stream: torch.cuda.Stream) -> None:
        torch.cuda.set_device(device)
        try:
            stream.synchronize()  # gives the thread the CUDA context, without which the saver's driver calls fail
            with torch.cuda.stream(stream):
                for piece in self._to_map:
                    self._make_room(self._coming.piece_bytes(piece))
                    self._sizes[self._coming] += self._coming.map_piece(piece)
                    self._progress(self._coming.piece_bytes(piece), mapped=piece + 1)
                    if self._leaving:  # at the same pace
                        self._release_next()
                    if piece >= _IN_FLIGHT:
                        self._coming.wait_for_piece(piece - _IN_FLIGHT)
                while self._leaving:
                    self._release_next()
        finally:
            with self._changed:
                self._has_ended = True
                self._changed.notify_all()

    def _make_room(self, size_bytes: int) -> None:
        while True:
            with self._changed:
                if not self._leaving:  # others may be on their way
                    self._changed.wait_for(lambda: self._is_room_final or self._fits(size_bytes))
                    return
                if self._fits(size_bytes):
                    break
            self._release_next()
        self._save_ahead()

    def _fits(self, size_bytes: int) -> bool:
        return self._held_bytes + size_bytes <= self._room_bytes

    def _save_ahead(self) -> None:
        for number in range(min(_IN_FLIGHT, len(self._leaving))):
            regions, piece = self._leaving[number]
            regions.start_saving_piece(piece)

    def _release_next(self) -> None:
        self._save_ahead()
        regions, piece = self._leaving[0]
        size = regions.piece_bytes(piece)
        self._sizes[regions] += regions.release_piece(piece)
        self._leaving.popleft()
        self._progress(-size)

    def _progress(self, size_bytes: int, *, mapped: int | None = None) -> None:
        with self._changed:
            self._held_bytes += size_bytes
            self._mapped = self._mapped if mapped is None else mapped
            self._changed.notify_all()

    def _undo(self) -> None:
        """After an error: what had come goes again, and what was to go does, so far as it is kept."""
        self._coming.drop_state()
        for regions, piece in self._leaving:
            try:
                self._sizes[regions] += regions.release_piece(piece)
            except Exception:  # its keeper's; the first error tells of it
                return
