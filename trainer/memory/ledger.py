"""What the process and its device hold right now, as the operating system and the driver count it: the other side of
the ledger, which the owners' own byte counts are compared with."""

from __future__ import annotations

import ctypes
import gc
from contextlib import suppress

import psutil
import torch


def sample_memory() -> dict[str, int | None]:
    """Bytes in use now: this process's resident and proportional set, the host's, the GPU's (all processes).

    Garbage is collected first; ``pss_bytes`` is taken after malloc has given back the freed blocks that it holds for
    reuse, and ``gpu_used_bytes`` after torch's allocator has given back its cached blocks.
    """
    gc.collect()
    untrimmed = psutil.Process().memory_full_info()
    with suppress(OSError, AttributeError):  # glibc only
        ctypes.CDLL("libc.so.6").malloc_trim(0)
    process, host = psutil.Process().memory_full_info(), psutil.virtual_memory()
    sample: dict[str, int | None] = {
        "rss_bytes": process.rss,
        "pss_bytes": process.pss,
        "pss_untrimmed_bytes": untrimmed.pss,
        "host_used_bytes": host.total - host.available,
        "gpu_used_bytes": None,
        "gpu_reserved_bytes": None,
        "gpu_allocated_bytes": None,
    }
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info()
        sample["gpu_used_bytes"] = total - free
        sample["gpu_reserved_bytes"] = torch.cuda.memory_reserved()
        sample["gpu_allocated_bytes"] = torch.cuda.memory_allocated()
    return sample
