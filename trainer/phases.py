"""Phases: the named stretches of the loop, timed and memory-sampled, and the record of what sleeps in them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import psutil
import torch

Record = dict[str, Any]


class Phases:
    """Times phases and collects memory records.

    Args:
        write: takes each record of memory.jsonl (nothing is written on other ranks than 0).
        gpu: sample GPU memory too.
    """

    def __init__(self, write: Callable[[Record], None], *, gpu: bool) -> None:
        self._write, self._gpu = write, gpu
        self._process = psutil.Process()
        self._step, self._phase = 0, "build"
        self._asleep: dict[tuple[str, str], tuple[int, int]] = {}
        self._peak_asleep = (0, 0)
        self._seconds: dict[str, float] = {}

    @contextmanager
    def phase(self, name: str, *, step: int) -> Iterator[None]:
        """Everything inside counts as phase ``name`` of ``step``."""
        self._step, self._phase = step, name
        start = time.perf_counter()
        with torch.profiler.record_function(name):  # its name in a trace
            yield
            if self._gpu:
                torch.cuda.synchronize()
        self._seconds[name] = self._seconds.get(name, 0.0) + time.perf_counter() - start
        self._sample()

    def observe(self, event: Record) -> None:
        """A region fell asleep or woke up; called by roles and the engine."""
        self._write({"step": self._step, "phase": self._phase, **event})
        key = (event["role"], event["kind"])
        if event["state"] == "asleep":
            self._asleep[key] = (event["released_bytes"], event["backup_bytes"])
        else:
            self._asleep.pop(key, None)
        released, backed_up = (sum(sizes[i] for sizes in self._asleep.values()) for i in (0, 1))
        self._peak_asleep = max(self._peak_asleep, (released, backed_up))

    def end_step(self) -> Mapping[str, float | int]:
        """Metrics of the step that ends: ``seconds/<phase>`` and memory; starts the next step's count."""
        metrics: dict[str, float | int] = {f"seconds/{name}": seconds for name, seconds in self._seconds.items()}
        metrics["host_rss_bytes"] = self._process.memory_info().rss
        metrics["asleep_released_bytes"], metrics["asleep_backup_bytes"] = self._peak_asleep
        self._seconds, self._peak_asleep = {}, (0, 0)
        return metrics

    def _sample(self) -> None:
        memory = self._process.memory_full_info()
        gpu_allocated = gpu_used = None
        if self._gpu:
            free, total = torch.cuda.mem_get_info()
            gpu_allocated, gpu_used = torch.cuda.memory_allocated(), total - free
        self._write(
            {
                "step": self._step,
                "phase": self._phase,
                "time_seconds": time.time(),
                "rss_bytes": memory.rss,
                "pss_bytes": memory.pss,
                "gpu_allocated_bytes": gpu_allocated,
                "gpu_used_bytes": gpu_used,
            }
        )
