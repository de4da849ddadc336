"""The host copy of a role's optimizer state, in an arena of our own (``memory.<role>.optim_keeper=arena``).

The region then has no backup of the saver's: the saver only releases and maps the memory. Copies run on a side
stream. The one to the host may start as soon as the optimizer step is done, :meth:`ArenaKeeper.finish_save` waits for
it; the one back starts as soon as the memory is mapped, and the first reader waits for it on its stream.
"""

from __future__ import annotations

import torch

from trainer.memory.arena import HostArena


class ArenaKeeper:
    """Keeps ``flat`` [n], a tensor of a region without a backup, while that region sleeps; ``arena`` has its size."""

    def __init__(self, flat: torch.Tensor, *, arena: HostArena) -> None:
        self._flat, self._arena = flat, arena
        self._copy = self._arena.empty_like(flat)
        self._stream = torch.cuda.Stream()
        self._is_saved = False

    @property
    def host_bytes(self) -> int:
        return self._arena.size_bytes

    @property
    def copy(self) -> torch.Tensor:
        """The host copy [n], valid after :meth:`finish_save`."""
        return self._copy

    def start_save(self) -> None:
        """Begin copying to the host, after everything queued so far, unless that was begun and :meth:`invalidate` not
        called since; the tensor must not change until it is saved."""
        if self._is_saved:
            return
        self._arena.wait_until_ready()
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            self._copy.copy_(self._flat, non_blocking=True)
        self._is_saved = True

    def finish_save(self) -> None:
        """Wait until the host copy is complete (starting it first if nobody has)."""
        self.start_save()
        self._stream.synchronize()
        self._is_saved = False

    def invalidate(self) -> None:
        """The tensor is about to change: a copy started earlier is worth nothing any more."""
        torch.cuda.current_stream().wait_stream(self._stream)
        self._is_saved = False

    def start_restore(self) -> None:
        """Begin copying back; work queued on the current stream from now on sees the restored tensor."""
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            self._flat.copy_(self._copy, non_blocking=True)
        torch.cuda.current_stream().wait_stream(self._stream)
