"""Keeps an optimizer state, piece by piece, while its regions sleep (``memory.<role>.optim_keeper``).

The regions have no backup of the saver's then: the saver only releases and maps their memory. A *store* holds the
bytes (:mod:`trainer.memory.stores`). Copies run in a thread and on a stream of their own. Those to the store may start
as soon as the optimizer step is done, those back as soon as a piece is mapped; whoever needs the state waits for them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import Protocol

import torch

from trainer.memory.arena import Copies

Wait = Callable[[], object]


class Store(Protocol):
    """Where the bytes of the pieces are while they sleep. Called in the keeper's thread, on its stream."""

    @property
    def host_bytes(self) -> int:
        """Host memory in use."""
        ...

    def start_write(self, number: int, piece: torch.Tensor) -> Wait:
        """Begin to keep ``piece`` [n] under its number -> blocks until that is done, when called (once or more)."""
        ...

    def start_read(self, number: int, piece: torch.Tensor) -> Wait:
        """Begin to fill ``piece`` with what was kept under its number; likewise."""
        ...

    def host_tensor(self, number: int) -> torch.Tensor | None:
        """What is kept, if it lies in host memory as it is."""
        ...


class StateKeeper:
    """Copies ``pieces``, tensors of regions without a backup, to a store and back.

    A copy in the store serves until :meth:`invalidate` is called: a state that has not changed is not copied again.

    Args:
        main_pieces: so many pieces, the first ones, hold main params.
    """

    def __init__(self, pieces: Sequence[torch.Tensor], *, main_pieces: int, store: Store) -> None:
        self._pieces, self.main_pieces, self._store = tuple(pieces), main_pieces, store
        self._stream = torch.cuda.Stream()
        device = torch.cuda.current_device()
        self._thread = ThreadPoolExecutor(
            1, thread_name_prefix="keeper", initializer=torch.cuda.set_device, initargs=(device,)
        )
        self.copies = Copies()
        self._writes: dict[int, Future[Wait]] = {}
        self._reads: dict[int, Future[Wait]] = {}

    @property
    def host_bytes(self) -> int:
        return self._store.host_bytes

    def start_save(self, number: int | None = None) -> None:
        """Begin to copy to the store what has changed, or one piece of it, after all work queued so far; the state must
        not change until it is saved."""
        self.wait()
        for one in range(len(self._pieces)) if number is None else (number,):
            if one not in self._writes:
                self.copies.to_host += self._pieces[one].nbytes
                self._writes[one] = self._submit(self._store.start_write, one, self._pieces[one])

    def finish_save(self, number: int) -> None:
        """Wait until the store has a piece (starting the copies first if nobody has)."""
        if number not in self._writes:
            self.start_save()
        try:
            self._writes[number].result()()
        except BaseException:
            for one in sorted(one for one in self._writes if one >= number):  # nothing is kept of it and what follows
                with suppress(Exception):
                    self._writes.pop(one).result()()
            raise

    def invalidate(self) -> None:
        """The state may change from now on: copies made earlier are worth nothing any more."""
        self.wait()
        for number in self._writes:
            self.finish_save(number)
        self._writes.clear()

    def start_restore(self, number: int) -> None:
        """Begin to copy a mapped piece back."""
        self.copies.to_device += self._pieces[number].nbytes
        self._reads[number] = self._submit(self._store.start_read, number, self._pieces[number])

    def wait_for(self, number: int) -> None:
        """Block until a piece on its way is back."""
        read = self._reads.get(number)
        if read is not None:
            read.result()()

    def forget_reads(self) -> None:
        """Wait for what is on its way back, which nobody wants any more, also where it fails."""
        for number in sorted(self._reads):
            with suppress(Exception):
                self._reads.pop(number).result()()

    def wait(self, *, main_params_only: bool = False) -> None:
        """Block until every mapped piece (or those with main params alone, which the caller may only read) is back."""
        for number in sorted(self._reads):
            if not main_params_only or number < self.main_pieces:
                self._reads.pop(number).result()()

    def read_main_params(self) -> list[torch.Tensor]:
        """Copies of the pieces with main params, made on the device from the store, for a state that sleeps."""
        copies = [torch.empty_like(piece) for piece in self._pieces[: self.main_pieces]]
        self.copies.to_device += sum(copy.nbytes for copy in copies)
        reads = [self._submit(self._store.start_read, number, copy) for number, copy in enumerate(copies)]
        for read in reads:
            read.result()()
        return copies

    def host_tensors(self) -> list[torch.Tensor] | None:
        """The store's copies of a sleeping state, if they lie in host memory as they are."""
        for number in self._writes:
            self.finish_save(number)
        found = [self._store.host_tensor(number) for number in range(len(self._pieces))]
        tensors = [tensor for tensor in found if tensor is not None]
        return tensors if len(tensors) == len(found) else None

    def _submit(self, start: Callable[[int, torch.Tensor], Wait], number: int, piece: torch.Tensor) -> Future[Wait]:
        queued = torch.cuda.Event()
        queued.record(torch.cuda.current_stream())

        def run() -> Wait:
            self._stream.wait_event(queued)
            with torch.cuda.stream(self._stream):
                return start(number, piece)

        return self._thread.submit(run)
