"""Traces of single steps by torch.profiler, for ``diagnostics.profile_steps`` and ``debug=profiler``.

Simplification: a trace is one step of one rank, from its start to its end; it holds the phases by name.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import distributed

FOLDER = "traces"


class StepTraces:
    """Writes ``<folder>/step_<n>_rank_<r>.json.gz`` of the steps asked for; ui.perfetto.dev shows such files.

    Args:
        note: takes a line for the user per trace.
    """

    def __init__(self, steps: Collection[int], folder: Path, *, note: Callable[[str], None]) -> None:
        self._steps, self._folder, self._note = steps, folder, note

    @contextmanager
    def around(self, step: int) -> Iterator[None]:
        """Everything inside is step ``step``."""
        if step not in self._steps:
            yield
            return
        with torch.profiler.profile() as profile:
            yield
        self._folder.mkdir(parents=True, exist_ok=True)
        path = self._folder / f"step_{step}_rank_{distributed.get_rank()}.json.gz"
        profile.export_chrome_trace(str(path))
        self._note(f"trace of step {step}: {path} (open it with https://ui.perfetto.dev)")
