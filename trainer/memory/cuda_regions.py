"""What torch_memory_saver does not tell: the size and addresses of its regions on a GPU.

Read from the MemPools that it keeps per (tag, backup, ...) key; one module knows that private layout.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from typing import Any

import torch

_POISON_BYTE = 0xFF  # NaN as bf16 and fp32


class CudaRegions:
    """Sizes, room check and poison of the regions of ``torch_memory_saver`` (version 0.0.10's pools)."""

    def __init__(self, tms: Any) -> None:
        self._tms = tms
        self._cudart = ctypes.CDLL(f"libcudart.so.{str(torch.version.cuda).split('.')[0]}")

    def _segments(self, tag: str, *, backup: bool | None) -> Iterator[dict[str, Any]]:
        for (pool_tag, has_backup, *_), pool in self._tms._impl._mem_pools.items():
            if pool_tag == tag and backup in (None, has_backup):
                yield from pool.snapshot()

    def resident_bytes(self, tag: str, *, backup: bool | None = None) -> int:
        """Bytes of the allocator's segments of ``tag``; with ``backup`` only those that have one (or have none)."""
        return sum(segment["total_size"] for segment in self._segments(tag, backup=backup))

    def wait_for_device(self) -> None:
        """Block until all work queued on the device, collectives included, is done."""
        torch.cuda.synchronize()

    def check_room(self, tags: Sequence[str]) -> None:
        """Raise MemoryError, naming what is missing, where the device has too little free memory to wake ``tags``."""
        needed = sum(self.resident_bytes(tag) for tag in tags)
        free, total = torch.cuda.mem_get_info()
        if needed > free:
            torch.cuda.empty_cache()
            free, total = torch.cuda.mem_get_info()
        if needed > free:
            raise MemoryError(
                f"waking {', '.join(tags)} needs {needed / 2**30:.2f} GiB of GPU memory and {free / 2**30:.2f} of "
                f"{total / 2**30:.2f} GiB are free: {(needed - free) / 2**30:.2f} GiB are missing. Let another role "
                "or the rollout engine sleep first, or use smaller micro-batches (algo.micro_batch_size)"
            )

    def fill_with_poison(self, tag: str) -> None:
        """Fill what has no backup with NaN bytes."""
        for segment in self._segments(tag, backup=False):
            address, size = ctypes.c_void_p(segment["address"]), ctypes.c_size_t(segment["total_size"])
            status = self._cudart.cudaMemset(address, _POISON_BYTE, size)
            assert status == 0, f"cudaMemset failed with {status}"
