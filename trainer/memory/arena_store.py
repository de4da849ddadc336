"""A store in host memory (``optim_keeper=arena``)."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from trainer.memory.arena import HostArena
from trainer.memory.keeper import Wait


class ArenaStore:
    """An exact-size arena in host memory, page-locked where a GPU copies from it."""

    def __init__(self, pieces: Sequence[torch.Tensor], arena: HostArena) -> None:
        self._arena = arena
        self._copies = [arena.empty_like(piece) for piece in pieces]

    bytes_needed = staticmethod(HostArena.bytes_needed)

    @property
    def host_bytes(self) -> int:
        return self._arena.size_bytes

    def start_write(self, number: int, piece: torch.Tensor) -> Wait:
        self._arena.wait_until_ready()
        return _start_copy(self._copies[number], piece)

    def start_read(self, number: int, piece: torch.Tensor) -> Wait:
        return _start_copy(piece, self._copies[number])

    def host_tensor(self, number: int) -> torch.Tensor | None:
        return self._copies[number]


def _start_copy(target: torch.Tensor, source: torch.Tensor) -> Wait:
    target.copy_(source, non_blocking=True)
    done = torch.cuda.Event()
    done.record()
    return done.synchronize
