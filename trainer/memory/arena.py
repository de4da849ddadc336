"""Flat host memory of exactly the size asked for, out of which tensors are cut.

``torch.empty(pin_memory=True)`` rounds every tensor up to a power of two; an arena is one anonymous mmap, page-locked
with cudaHostRegister where a GPU copies from it. Touching it with huge pages and several threads first makes the
registration about seven times faster than cudaMallocHost, and it runs in the background while models are built.
"""

from __future__ import annotations

import mmap
import time
from collections.abc import Collection, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass

import torch

from trainer.common.multiples import ALIGNMENT_BYTES, round_up
from trainer.config.schema import Config

_TOUCH_THREADS = 8
_MADV_HUGEPAGE = 14  # Linux; the mmap module names it on some builds only


def _aligned(size_bytes: int) -> int:
    return round_up(size_bytes, ALIGNMENT_BYTES)


@dataclass
class Copies:
    """Bytes that one owner has copied between the device and host memory or a disk since it was made."""

    to_host: int = 0
    to_device: int = 0


@dataclass(frozen=True)
class RegionBytes:
    """What one region released and what of it the saver copied to host memory, in bytes."""

    released_bytes: int
    backup_bytes: int

    def __add__(self, other: RegionBytes) -> RegionBytes:
        return RegionBytes(self.released_bytes + other.released_bytes, self.backup_bytes + other.backup_bytes)


class HostArena:
    """Anonymous host memory that lives as long as the arena, or a tensor cut from it, does."""

    is_on_device = False

    def __init__(self, size_bytes: int, *, pinned: bool, is_lazy: bool = False) -> None:
        """Reserve ``size_bytes``; with ``pinned`` start page-locking them for GPU copies in the background, if
        ``is_lazy`` not before somebody waits for that."""
        self.size_bytes = size_bytes
        self.pinning_seconds = 0.0
        memory = mmap.mmap(-1, max(size_bytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._flat = torch.frombuffer(memory, dtype=torch.uint8)
        self._used_bytes = 0
        self._pinning: Future[None] | None = None
        self._is_to_be_pinned = bool(pinned and size_bytes)
        if self._is_to_be_pinned:
            with suppress(OSError):  # a kernel without transparent huge pages: page-locking is slower, that is all
                memory.madvise(_MADV_HUGEPAGE)
            if not is_lazy:
                self._start_pinning()

    def _start_pinning(self) -> None:
        executor = ThreadPoolExecutor(1, thread_name_prefix="pin")
        self._pinning = executor.submit(self._pin, torch.cuda.current_device())
        executor.shutdown(wait=False)

    @staticmethod
    def bytes_needed(tensors: Iterable[torch.Tensor]) -> int:
        """Size of an arena for copies of ``tensors``."""
        return sum(_aligned(tensor.nbytes) for tensor in tensors)

    @property
    def whole(self) -> torch.Tensor:
        """All of it as bytes, [size_bytes] uint8."""
        return self._flat[: self.size_bytes]

    def empty_like(self, tensor: torch.Tensor) -> torch.Tensor:
        """The next piece of the arena as a contiguous tensor of ``tensor``'s shape and dtype."""
        start = self._used_bytes
        self._used_bytes += _aligned(tensor.nbytes)
        assert self._used_bytes <= self.size_bytes, "the arena is full"
        return self._flat[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)

    def wait_until_ready(self) -> None:
        """Block until page-locking is done. Call it before the first byte is written: touching the pages zeroes them.
        Raises RuntimeError if the driver refused."""
        if self._is_to_be_pinned and self._pinning is None:
            self._start_pinning()
        if self._pinning is not None:
            self._pinning.result()

    def _pin(self, device: int) -> None:
        start = time.perf_counter()
        torch.cuda.set_device(device)
        with ThreadPoolExecutor(_TOUCH_THREADS) as pool:
            list(pool.map(torch.Tensor.zero_, self._flat.tensor_split(_TOUCH_THREADS)))
        error = torch.cuda.cudart().cudaHostRegister(self._flat.data_ptr(), self.size_bytes, 0)  # type: ignore[union-attr]
        if int(error) != 0:
            raise RuntimeError(
                f"the CUDA driver could not page-lock {self.size_bytes / 2**30:.2f} GiB of host memory ({error}); "
                "another memory policy keeps less of it (memory=rebuild keeps least)"
            )
        self.pinning_seconds = time.perf_counter() - start

    def __del__(self) -> None:
        with suppress(Exception):  # at interpreter exit torch may be gone, and the driver frees everything
            if self._pinning is not None and self._pinning.exception() is None:
                torch.cuda.synchronize()
                torch.cuda.cudart().cudaHostUnregister(self._flat.data_ptr())  # type: ignore[union-attr]


class DeviceArena:
    """The same in device memory outside every region: what lies there never sleeps."""

    is_on_device = True

    def __init__(self, size_bytes: int) -> None:
        self.size_bytes = size_bytes
        self._flat = torch.empty(size_bytes, dtype=torch.uint8, device=torch.cuda.current_device())
        self._used_bytes = 0

    empty_like = HostArena.empty_like

    def wait_until_ready(self) -> None:
        pass


Arena = HostArena | DeviceArena


class HostArenas:
    """Makes the arenas of a run. Those whose size is known beforehand page-lock themselves while models are built,
    others when they are first used.

    Attributes:
        on_device: owners whose arenas lie in device memory instead.
    """

    def __init__(self, *, pinned: bool, on_device: Collection[str] = ()) -> None:
        self.pinned, self.on_device = pinned, frozenset(on_device)
        self._reserved: dict[str, HostArena] = {}

    @classmethod
    def of(cls, config: Config, *, on_device: Collection[str] = ()) -> HostArenas:
        """Those of a run: page-locked where a GPU copies from them, at sleeps or when it switches weights."""
        return cls(pinned=config.platform.name == "cuda", on_device=on_device)

    def reserve(self, sizes_bytes: Mapping[str, int]) -> None:
        """Start making an arena for each owner (any name, the same as in :meth:`take`)."""
        self._reserved.update((owner, HostArena(size, pinned=self.pinned)) for owner, size in sizes_bytes.items())

    def take(self, owner: str, size_bytes: int) -> HostArena:
        """The arena reserved for ``owner``; a new one if none of exactly this size was."""
        reserved = self._reserved.pop(owner, None)
        if reserved is not None and reserved.size_bytes == size_bytes:
            return reserved
        return HostArena(size_bytes, pinned=self.pinned, is_lazy=True)

    def take_for_tag(self, tag: str, size_bytes: int) -> Arena:
        """The arena of a weights tag, ``weights/<tag>``, in host or device memory."""
        owner = f"weights/{tag}"
        return DeviceArena(size_bytes) if owner in self.on_device else self.take(owner, size_bytes)
