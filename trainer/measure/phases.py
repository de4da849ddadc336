"""Phases: the named stretches of the loop, timed and memory-sampled, and the record of what sleeps in them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import psutil
import torch

from trainer.memory.ledger import sample_memory
from trainer.memory.turns import EverythingSleeps, Turns

Record = dict[str, Any]

SAMPLING = "memory_samples"
_MOVED = ("moved_to_host_bytes", "moved_to_device_bytes", "moving_seconds")
_PSS_SHARE_OF_TIME = 0.02  # at most so much of the time goes into asking for the proportional set


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
        self._moved: tuple[float, ...] = (0, 0, 0.0)
        self._seconds: dict[str, float] = {}
        self._next_pss_at = 0.0
        self.turns: Turns = EverythingSleeps()
        self._rates: Callable[[Mapping[str, float]], Mapping[str, float]] | None = None

    @contextmanager
    def phase(self, name: str, *, step: int) -> Iterator[None]:
        """Everything inside counts as phase ``name`` of ``step``. The memory sample after it counts as a phase of its
        own; it holds the proportional set only now and then, for which the kernel walks through all pages."""
        self._step, self._phase = step, name
        start = time.perf_counter()
        with torch.profiler.record_function(name):  # its name in a trace
            self.turns.begin(name)
            yield
            if self._gpu:
                torch.cuda.synchronize()
        worked = time.perf_counter()
        self.turns.end(name)
        self._sample()
        for phase, seconds in ((name, worked - start), (SAMPLING, time.perf_counter() - worked)):
            self._seconds[phase] = self._seconds.get(phase, 0.0) + seconds

    def observe(self, event: Record) -> None:
        """A region fell asleep or woke up; called by roles and the engine."""
        self._write({"step": self._step, "phase": self._phase, **event})
        moved = (event.get("to_host_bytes", 0), event.get("to_device_bytes", 0), event.get("seconds", 0.0))
        self._moved = tuple(so_far + more for so_far, more in zip(self._moved, moved, strict=True))
        key = (event["role"], event["kind"])
        if event["state"] == "asleep":
            self._asleep[key] = (event["released_bytes"], event["backup_bytes"])
        else:
            self._asleep.pop(key, None)
        released, backed_up = (sum(sizes[i] for sizes in self._asleep.values()) for i in (0, 1))
        self._peak_asleep = max(self._peak_asleep, (released, backed_up))

    def rate_with(self, rates: Callable[[Mapping[str, float]], Mapping[str, float]]) -> None:
        """Let ``rates`` turn the seconds of this step's phases into more metrics of it."""
        self._rates = rates

    def end_step(self) -> Mapping[str, float | int]:
        """Metrics of the step that ends: ``seconds/<phase>``, rates and memory; starts the next step's count."""
        metrics: dict[str, float | int] = {f"seconds/{name}": seconds for name, seconds in self._seconds.items()}
        metrics |= self._rates(self._seconds) if self._rates else {}
        metrics["host_rss_bytes"] = self._process.memory_info().rss
        metrics["asleep_released_bytes"], metrics["asleep_backup_bytes"] = self._peak_asleep
        metrics |= dict(zip(_MOVED, self._moved, strict=True))
        self._seconds, self._peak_asleep, self._rates, self._moved = {}, (0, 0), None, (0, 0, 0.0)
        return metrics

    def ledger(self, moment: str, *, step: int) -> None:
        """Record all that process and device hold at ``moment``, "baseline" or, where everything sleeps in the end,
        "asleep"; takes about 50 ms."""
        if self.turns.keeps_awake:
            return
        self._write({"step": step, "phase": self._phase, "moment": moment, **sample_memory()})

    def _pss_bytes(self) -> int | None:
        start = time.perf_counter()
        if start < self._next_pss_at:
            return None
        pss_bytes = self._process.memory_full_info().pss
        end = time.perf_counter()
        self._next_pss_at = end + (end - start) / _PSS_SHARE_OF_TIME
        return pss_bytes

    def _sample(self) -> None:
        gpu_allocated = gpu_used = None
        if self._gpu:
            free, total = torch.cuda.mem_get_info()
            gpu_allocated, gpu_used = torch.cuda.memory_allocated(), total - free
        self._write(
            {
                "step": self._step,
                "phase": self._phase,
                "time_seconds": time.time(),
                "rss_bytes": self._process.memory_info().rss,
                "pss_bytes": self._pss_bytes(),
                "gpu_allocated_bytes": gpu_allocated,
                "gpu_used_bytes": gpu_used,
            }
        )
