"""What the machine below a run allows: host and GPU memory, and what lies on a disk."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

ROOT = Path("/")


def host_memory_limit_bytes(root: Path = ROOT) -> int | None:
    """The least of what control groups (v1 and v2) allow this process and what the machine has; None if nobody says.

    Args:
        root: where ``proc`` and ``sys`` lie.
    """
    limits = [*_cgroup_limits(root)]
    with suppress(OSError, ValueError, StopIteration):
        lines = (root / "proc/meminfo").read_text().splitlines()
        limits.append(next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemTotal:")))
    return min(limits, default=None)


def _cgroup_limits(root: Path) -> Iterator[int]:
    """Of the process's groups and of all above them. A container may see its own group at the top of the tree."""
    with suppress(OSError):
        for line in (root / "proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers == "":
                top, name = root / "sys/fs/cgroup", "memory.max"
            elif "memory" in controllers.split(","):
                top, name = root / "sys/fs/cgroup/memory", "memory.limit_in_bytes"
            else:
                continue
            group = top / path.lstrip("/")
            for folder in (group, *group.parents):
                with suppress(OSError, ValueError):  # no such group here, or "max"
                    yield int((folder / name).read_text())
                if folder == top:
                    break


def gpu_memory_bytes() -> int | None:
    """Memory of the machine's smallest NVIDIA GPU, as its driver reports it without a CUDA context; None if there is no
    driver or no GPU."""
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return None
    count, found = ctypes.c_uint(), []
    if nvml.nvmlInit_v2() != 0:
        return None
    if nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)) == 0:
        for index in range(count.value):
            device, memory = ctypes.c_void_p(), (ctypes.c_ulonglong * 3)()  # total, free, used
            failed = nvml.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(device))
            failed = failed or nvml.nvmlDeviceGetMemoryInfo(device, ctypes.byref(memory))
            found += [] if failed else [memory[0]]
    nvml.nvmlShutdown()
    return min(found, default=None)


def filesystem_of(path: Path, root: Path = ROOT) -> str:
    """Type of the file system that holds ``path``, e.g. ``ext4`` or ``tmpfs``; empty if nobody says."""
    where, found = path.resolve(), ("", "")
    with suppress(OSError):
        for line in (root / "proc/self/mountinfo").read_text().splitlines():
            mounted, _, source = line.partition(" - ")
            point = mounted.split()[4].replace("\\040", " ")
            if where.is_relative_to(point) and len(point) >= len(found[0]):
                found = (point, source.split()[0])
    return found[1]
