"""Regions that sleep: one interface over torch_memory_saver, and a null saver for ``offload=none``.

torch_memory_saver ends the process on a wrong pause or resume. The state of every tag is therefore kept here, in
Python, and a wrong call is an exception. This module and ``patches`` are the only ones that import it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import patches
from trainer.config.schema import Config
from trainer.memory.arena import RegionBytes
from trainer.memory.scheduled import Scheduled
from trainer.memory.turns import EverythingSleeps, Turns
from trainer.plan.schedule import Schedule


class Saver(Protocol):
    """Sleep and wake-up of tagged regions of device memory."""

    sleeps: bool
    turns: Turns  # who is awake when
    keeps_host_buffers: bool  # page-locked in the first sleep and kept for later ones

    def region(self, tag: str, *, backup: bool) -> AbstractContextManager[None]:
        """Allocate inside: the memory belongs to ``tag``; with ``backup`` its bytes survive a sleep."""
        ...

    def wait_for_device(self) -> None:
        """Block until all work queued on the device, collectives included, is done."""
        ...

    def sleep(self, tag: str, *, wait: bool = True) -> RegionBytes:
        """Release the memory of ``tag``. Raises RuntimeError if it is asleep.

        Memory goes at once, whatever kernel still uses it. Without ``wait`` the caller knows that none does.
        """
        ...

    def wake_up(self, tag: str) -> RegionBytes:
        """Map the memory of ``tag`` again; bytes without a backup are undefined. Raises RuntimeError if awake."""
        ...

    def is_asleep(self, tag: str) -> bool: ...

    def resident_bytes(self, tag: str) -> int:
        """Device memory of ``tag`` while it is awake."""
        ...

    def check_room(self, tags: Sequence[str]) -> None:
        """Raise MemoryError if the device has too little free memory to wake all of ``tags``."""
        ...


class NullSaver:
    """``offload=none``: regions are ordinary memory and never sleep."""

    sleeps = False
    keeps_host_buffers = False

    def __init__(self) -> None:
        self.turns: Turns = EverythingSleeps()  # as far as anything does

    def region(self, tag: str, *, backup: bool) -> AbstractContextManager[None]:
        return nullcontext()

    def wait_for_device(self) -> None:
        pass

    def sleep(self, tag: str, *, wait: bool = True) -> RegionBytes:
        return RegionBytes(0, 0)

    def wake_up(self, tag: str) -> RegionBytes:
        return RegionBytes(0, 0)

    def is_asleep(self, tag: str) -> bool:
        return False

    def resident_bytes(self, tag: str) -> int:
        return 0

    def check_room(self, tags: Sequence[str]) -> None:
        pass


class MemorySaver:
    """``offload=train`` and ``auto``: torch_memory_saver's regions (on CPU its stand-in's, ``patches.cpu_saver``)."""

    sleeps = True

    def __init__(self, *, platform: str, poison: bool, retain_cpu_backup: bool, cpu_backup_backend: str) -> None:
        from torch_memory_saver import torch_memory_saver

        self._tms: Any = torch_memory_saver
        self.turns: Turns = EverythingSleeps()
        self._asleep: dict[str, bool] = {}
        self._poison, self._on_gpu = poison, platform == "cuda"
        self._backend = cpu_backup_backend if platform == "cuda" else None
        self.keeps_host_buffers = platform == "cuda" and retain_cpu_backup
        if platform == "cuda":
            import megatron.core.models.gpt  # noqa: F401  (its first import sets hook_mode, and fails after what follows)

            from trainer.memory.cuda_regions import CudaRegions

            self._tms.hook_mode = "preload"
            self._tms.retain_cpu_backup = retain_cpu_backup
            self._pools: Any = CudaRegions(self._tms, is_asleep=self.is_asleep)
        else:
            assert "cpu_saver" in patches.applied()
            self._tms._impl.poison = poison
            self._pools = self._tms._impl

    def region(self, tag: str, *, backup: bool) -> AbstractContextManager[None]:
        if self._asleep.get(tag, False):
            raise RuntimeError(f"region {tag} is asleep: wake it up before allocating in it")
        self._asleep[tag] = False
        backend = self._backend if backup else None
        return self._tms.region(tag=tag, enable_cpu_backup=backup, cpu_backup_backend=backend)

    def is_asleep(self, tag: str) -> bool:
        return self._asleep.get(tag, False)

    def wait_for_device(self) -> None:
        self._pools.wait_for_device()

    def sleep(self, tag: str, *, wait: bool = True) -> RegionBytes:
        if self._asleep.get(tag, False):
            raise RuntimeError(f"region {tag} is asleep already")
        sizes = self._sizes(tag)
        if wait:
            self.wait_for_device()
        self._tms.pause(tag)
        self._asleep[tag] = True
        return sizes

    def wake_up(self, tag: str) -> RegionBytes:
        if not self._asleep.get(tag, False):
            raise RuntimeError(f"region {tag} is awake already")
        sizes = self._sizes(tag)
        self.check_room([tag])
        self._tms.resume(tag)
        self._asleep[tag] = False
        if self._poison:
            self._pools.fill_with_poison(tag)
        return sizes

    def resident_bytes(self, tag: str) -> int:
        return self._pools.resident_bytes(tag)

    def check_room(self, tags: Sequence[str]) -> None:
        self._pools.check_room(tags)

    def outside_bytes(self) -> int | None:
        """What no region has held since the last call, at most; None on the CPU, where nobody counts it."""
        asleep = [tag for tag, is_asleep in self._asleep.items() if is_asleep]
        return self._pools.outside_bytes(asleep) if self._on_gpu else None

    def _sizes(self, tag: str) -> RegionBytes:
        return RegionBytes(
            released_bytes=self._pools.resident_bytes(tag),
            backup_bytes=self._pools.resident_bytes(tag, backup=True),
        )


def make_saver(config: Config) -> Saver:
    """The saver that ``offload`` asks for. Everything sleeps that is not at work, until :func:`follow` is called."""
    if not config.offload.train:
        return NullSaver()
    return MemorySaver(
        platform=config.platform.name,
        poison=config.memory.poison,
        retain_cpu_backup=config.memory.retain_cpu_backup,
        cpu_backup_backend=config.memory.cpu_backup_backend,
    )


def follow(
    saver: Saver,
    schedule: Schedule | None,
    *,
    replan: Callable[[Mapping[str, int]], Schedule | None],
    corrects: bool,
    note: Callable[[str], None],
    ranks: int,
) -> None:
    """Let ``saver``'s regions sleep as ``schedule`` says; None, or where nothing sleeps at all: as they do without.

    Args:
        replan: phase -> bytes that no region holds -> the schedule with these.
        corrects: what the first step shows takes the place of the schedule's estimates.
        note: takes a line for the reader.
    """
    if schedule is None or not isinstance(saver, MemorySaver):
        return
    outside = saver.outside_bytes if corrects else lambda: None
    saver.turns = Scheduled(schedule, replan=replan, outside_bytes=outside, note=note, ranks=ranks)
