"""CUDA graphs of decoding steps, one for each number of rows that is worth one, kept for the whole run.

A graph holds addresses, and those of parameters, cache and slots outlive sleeps and weight updates. What a step needs
in between lies in the saver region ``engine/graphs``: every replay writes it before reading it, so a sleep may lose it.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from contextlib import suppress

import torch

from trainer.memory.saver import Saver

GRAPHS = "engine/graphs"
_SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)


def padded_rows(rows: int, *, most: int) -> int:
    """Rows of the graph that decodes ``rows`` rows; there are ``most`` slots."""
    return min(next((size for size in _SIZES if size >= rows), most), most)


class Graphs:
    """Graphs by what distinguishes them, captured on first use."""

    def __init__(self, saver: Saver) -> None:
        self._saver = saver
        self._graphs: dict[Hashable, torch.cuda.CUDAGraph] = {}
        # Of high priority only so that nobody else gets the same stream: cuBLAS keeps a workspace for each stream, and
        # this one's lies in the region.
        self._stream = torch.cuda.Stream(priority=-1)
        self._pool = torch.cuda.graph_pool_handle()

    @property
    def is_used(self) -> bool:
        """Whether there is a region yet."""
        return bool(self._graphs)

    def __contains__(self, key: Hashable) -> bool:
        return key in self._graphs

    def capture(self, key: Hashable, step: Callable[[], None]) -> None:
        """Record ``step``, which is run twice before: with rows that nobody needs.

        Raises:
            torch.OutOfMemoryError: there is no room for what the step needs in between.
        """
        graph = torch.cuda.CUDAGraph()
        with self._saver.region(GRAPHS, backup=False):
            self._stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self._stream):
                # What kernels, libraries and torch.compile set up on first use is no part of a graph.
                step()
                step()
                torch.cuda.synchronize()
                graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
                try:
                    step()
                except BaseException:
                    with suppress(RuntimeError):  # it would say once more that the capture has failed
                        graph.capture_end()
                    raise
                graph.capture_end()
            torch.cuda.current_stream().wait_stream(self._stream)
        self._graphs[key] = graph

    def replay(self, key: Hashable, *, times: int) -> None:
        for _ in range(times):
            self._graphs[key].replay()
