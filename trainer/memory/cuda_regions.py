"""What torch_memory_saver does not tell: the size and addresses of its regions on a GPU.

Read from the MemPools that it keeps per (tag, backup, ...) key; one module knows that private layout.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import torch

_POISON_BYTE = 0xFF  # NaN as bf16 and fp32
GIB = 2**30


def room_message(tags: Sequence[str], *, needed: int, free: int, total: int, own: int) -> str:
    """Why ``tags`` cannot wake up, and who holds the device's memory; all in bytes."""
    others = max(0, total - free - own)
    return (
        f"waking {', '.join(tags)} needs {needed / GIB:.2f} GiB of GPU memory and {free / GIB:.2f} of "
        f"{total / GIB:.2f} GiB are free: {(needed - free) / GIB:.2f} GiB are missing. This rank's tensors hold "
        f"{own / GIB:.2f} GiB, CUDA and other processes {others / GIB:.2f} (nvidia-smi names them): end those that are "
        "not wanted, or plan for less with launch.gpu_memory_gib and offload=auto, or use smaller micro-batches "
        "(algo.micro_batch_size)"
    )


class CudaRegions:
    """Sizes, room check and poison of the regions of ``torch_memory_saver`` (version 0.0.10's pools)."""

    def __init__(self, tms: Any, *, is_asleep: Callable[[str], bool]) -> None:
        self._tms, self.is_asleep = tms, is_asleep
        self._cudart = ctypes.CDLL(f"libcudart.so.{str(torch.version.cuda).split('.')[0]}")

    def _segments(self, tag: str, *, backup: bool | None) -> Iterator[dict[str, Any]]:
        for (pool_tag, has_backup, *_), pool in self._tms._impl._mem_pools.items():
            if pool_tag == tag and backup in (None, has_backup):
                yield from pool.snapshot()

    def resident_bytes(self, tag: str, *, backup: bool | None = None) -> int:
        """Bytes of the allocator's segments of ``tag``; with ``backup`` only those that have one (or have none)."""
        return sum(segment["total_size"] for segment in self._segments(tag, backup=backup))

    def outside_bytes(self, asleep: Collection[str]) -> int:
        """What no region has held since the last call, at most: tensors of all kinds, the context, communicators.

        Args:
            asleep: tags, whose memory torch counts as its own all the same.
        """
        segments = [segment for pool in self._tms._impl._mem_pools.values() for segment in pool.snapshot()]
        tensors = torch.cuda.max_memory_allocated() - sum(segment["allocated_size"] for segment in segments)
        free, total = torch.cuda.mem_get_info()
        released = sum(self.resident_bytes(tag) for tag in asleep)
        besides_torch = total - free - (torch.cuda.memory_reserved() - released)
        torch.cuda.reset_peak_memory_stats()
        return max(tensors, 0) + max(besides_torch, 0)

    def wait_for_device(self) -> None:
        """Block until all work queued on the device, collectives included, is done."""
        torch.cuda.synchronize()

    def check_room(self, tags: Sequence[str]) -> None:
        """Raise MemoryError, naming what is missing, where the device has too little free memory to wake ``tags``."""
        if not tags:  # as in most phases of a schedule: nothing to ask the driver
            return
        needed = sum(self.resident_bytes(tag) for tag in tags)
        free, total = torch.cuda.mem_get_info()
        if needed > free:
            torch.cuda.empty_cache()
            free, total = torch.cuda.mem_get_info()
        if needed > free:
            raise MemoryError(room_message(tags, needed=needed, free=free, total=total, own=self._own_bytes()))

    def _own_bytes(self) -> int:
        """What this process's tensors hold; paused segments, which torch counts, hold nothing."""
        tags = {tag for tag, *_ in self._tms._impl._mem_pools}
        asleep = sum(self.resident_bytes(tag) for tag in tags if self.is_asleep(tag))
        return torch.cuda.memory_reserved() - asleep

    def fill_with_poison(self, tag: str) -> None:
        """Fill what has no backup with NaN bytes."""
        for segment in self._segments(tag, backup=False):
            address, size = ctypes.c_void_p(segment["address"]), ctypes.c_size_t(segment["total_size"])
            status = self._cudart.cudaMemset(address, _POISON_BYTE, size)
            assert status == 0, f"cudaMemset failed with {status}"
