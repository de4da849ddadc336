"""The host copy of a role's optimizer state, in an arena of our own (``memory.<role>.optim_keeper=arena``).

The region then has no backup of the saver's: the saver only releases and maps the memory. Copies run on a side
stream. The one to the host may start as soon as the optimizer step is done, :meth:`ArenaKeeper.finish_save` waits for
it; the one back starts as soon as the memory is mapped and runs beside forward and backward passes, until whoever needs
the optimizer state calls :meth:`ArenaKeeper.wait`.
"""

from __future__ import annotations

import torch

from trainer.memory.arena import HostArena


class ArenaKeeper:
    """Keeps ``flat`` [n], a tensor of a region without a backup, while that region sleeps; ``arena`` has its size.

    Args:
        main_size: elements of the leading part that holds main params, which comes back first.
    """

    def __init__(self, flat: torch.Tensor, *, main_size: int, arena: HostArena) -> None:
        self._flat, self._main_size, self._arena = flat, main_size, arena
        self._copy = self._arena.empty_like(flat)
        self._stream = torch.cuda.Stream()
        self._main_is_back = torch.cuda.Event()
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
        """The tensor may change from now on on the current stream: a copy started earlier is worth nothing any more."""
        self.wait()
        self._is_saved = False

    def start_restore(self) -> None:
        """Begin copying back."""
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            self._flat[: self._main_size].copy_(self._copy[: self._main_size], non_blocking=True)
            self._main_is_back.record()
            self._flat[self._main_size :].copy_(self._copy[self._main_size :], non_blocking=True)

    def wait(self, *, main_params_only: bool = False) -> None:
        """Work queued on the current stream from now on finds the tensor restored (or its main params alone, which it
        may only read), and no copy of it under way."""
        if main_params_only:
            torch.cuda.current_stream().wait_event(self._main_is_back)
        else:
            torch.cuda.current_stream().wait_stream(self._stream)
