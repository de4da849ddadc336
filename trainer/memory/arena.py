"""Flat host memory of exactly the size asked for, out of which tensors are cut.

``torch.empty(pin_memory=True)`` rounds every tensor up to a power of two; an arena is one anonymous mmap, page-locked
with cudaHostRegister where a GPU copies from it. Touching it with huge pages and several threads first makes the
registration about seven times faster than cudaMallocHost, and it runs in the background while models are built.
"""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Collection, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import torch
from torch import Tensor, distributed

from trainer.common.multiples import ALIGNMENT_BYTES, divide_up, round_up
from trainer.config.node_copies import ranks_of_a_copy, ranks_of_copies
from trainer.config.schema import Config
from trainer.megatron.groups import group_among

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


class Arena:
    """Memory of ``size_bytes`` out of which tensors are cut."""

    is_on_device = False

    def __init__(self, flat: Tensor, size_bytes: int) -> None:
        """``flat``: at least so many bytes, uint8."""
        self._flat, self.size_bytes, self._used_bytes = flat, size_bytes, 0

    def empty_like(self, tensor: torch.Tensor) -> torch.Tensor:
        """The next piece of the arena as a contiguous tensor of ``tensor``'s shape and dtype."""
        start = self._used_bytes
        self._used_bytes += _aligned(tensor.nbytes)
        assert self._used_bytes <= self.size_bytes, "the arena is full"
        return self._flat[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)

    @property
    def host_bytes(self) -> int:
        """What this rank accounts for of the host's memory."""
        return 0 if self.is_on_device else self.size_bytes

    def own_share(self, tensor: Tensor) -> Tensor:
        """The part of a tensor, one of the arena or one as large, that this rank is to write."""
        return tensor

    def meet(self) -> None:
        """Wait for those who share the arena, if anybody does."""

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Read tensors of the arena inside, also what others write; nobody may write meanwhile."""
        self.meet()
        yield
        self.meet()

    def wait_until_ready(self) -> None:
        """Block until it may be written."""


class HostArena(Arena):
    """Anonymous host memory that lives as long as the arena, or a tensor cut from it, does."""

    def __init__(
        self, size_bytes: int, *, pinned: bool, is_lazy: bool = False, memory: mmap.mmap | None = None
    ) -> None:
        """Reserve ``size_bytes``, or take them of ``memory``; with ``pinned`` start page-locking them for GPU copies in
        the background, if ``is_lazy`` not before somebody waits for that."""
        self.pinning_seconds = 0.0
        memory = memory or mmap.mmap(-1, max(size_bytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        super().__init__(torch.frombuffer(memory, dtype=torch.uint8), size_bytes)
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
            list(pool.map(Tensor.zero_, self.own_share(self._flat).tensor_split(_TOUCH_THREADS)))
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


class SharedArena(HostArena):
    """One arena of several ranks of a node, which all of them map and page-lock. Each writes its share of every tensor
    and reads all. Making it, :meth:`meet` and :meth:`reading` are collective over ``ranks``, a gloo group.

    The memory has no name: it is gone with the last process that maps it, however that ends, and does not count
    against the size of /dev/shm.
    """

    def __init__(
        self, size_bytes: int, *, ranks: distributed.ProcessGroup, pinned: bool, is_lazy: bool = False
    ) -> None:
        self._ranks = ranks
        super().__init__(size_bytes, pinned=pinned, is_lazy=is_lazy, memory=_shared_memory(max(size_bytes, 1), ranks))

    @property
    def host_bytes(self) -> int:
        return divide_up(self.size_bytes, self._ranks.size())

    def own_share(self, tensor: Tensor) -> Tensor:
        flat, rank, ranks = tensor.detach().view(-1), self._ranks.rank(), self._ranks.size()
        return flat[len(flat) * rank // ranks : len(flat) * (rank + 1) // ranks]

    def meet(self) -> None:
        distributed.barrier(group=self._ranks)


def _shared_memory(size_bytes: int, ranks: distributed.ProcessGroup) -> mmap.mmap:
    """The same memory in all ``ranks``. The first makes it; the others open what it has open."""
    path = [""]
    if is_first := ranks.rank() == 0:
        made = os.memfd_create("torpor")
        os.ftruncate(made, size_bytes)
        path = [f"/proc/{os.getpid()}/fd/{made}"]
    distributed.broadcast_object_list(path, group=ranks, group_src=0)
    try:
        opened = os.open(path[0], os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        raise RuntimeError(
            f"the ranks of a node cannot open each other's memory ({error}), which memory.tags=node needs: let them "
            "run in one container and under one user, or use memory.tags=full or memory.tags=sharded"
        ) from error
    distributed.barrier(group=ranks)
    if is_first:
        os.close(made)
    try:
        return mmap.mmap(opened, size_bytes)
    finally:
        os.close(opened)


class DeviceArena(Arena):
    """The same in device memory outside every region: what lies there never sleeps."""

    is_on_device = True

    def __init__(self, size_bytes: int) -> None:
        super().__init__(torch.empty(size_bytes, dtype=torch.uint8, device=torch.cuda.current_device()), size_bytes)


class HostArenas:
    """Makes the arenas of a run. Those whose size is known beforehand page-lock themselves while models are built,
    others when they are first used.

    Attributes:
        on_device: owners whose arenas lie in device memory instead.

    Args:
        sharers: the ranks that have one host arena of every weights tag together; None: each has its own.
    """

    def __init__(
        self, *, pinned: bool, on_device: Collection[str] = (), sharers: distributed.ProcessGroup | None = None
    ) -> None:
        self.pinned, self.on_device, self._sharers = pinned, frozenset(on_device), sharers
        self._reserved: dict[str, HostArena] = {}

    @classmethod
    def of(cls, config: Config, *, on_device: Collection[str] = ()) -> HostArenas:
        """Those of a run: page-locked where a GPU copies from them, at sleeps or when it switches weights. Collective
        with ``memory.tags=node``, as is then all that makes an arena of a weights tag."""
        shares = config.memory.tags == "node" and ranks_of_a_copy(config) > 1
        sharers = group_among(ranks_of_copies(config)) if shares else None
        return cls(pinned=config.platform.name == "cuda", on_device=on_device, sharers=sharers)

    def reserve(self, sizes_bytes: Mapping[str, int]) -> None:
        """Start making an arena for each owner (any name, the same as in :meth:`take`)."""
        self._reserved.update((owner, self._new(owner, size, is_lazy=False)) for owner, size in sizes_bytes.items())

    def take(self, owner: str, size_bytes: int) -> HostArena:
        """The arena reserved for ``owner``; a new one if none of exactly this size was."""
        reserved = self._reserved.pop(owner, None)
        if reserved is not None and reserved.size_bytes == size_bytes:
            return reserved
        return self._new(owner, size_bytes, is_lazy=True)

    def _new(self, owner: str, size_bytes: int, *, is_lazy: bool) -> HostArena:
        if self._sharers is not None and owner.startswith("weights/"):
            return SharedArena(size_bytes, ranks=self._sharers, pinned=self.pinned, is_lazy=is_lazy)
        return HostArena(size_bytes, pinned=self.pinned, is_lazy=is_lazy)

    def take_for_tag(self, tag: str, size_bytes: int) -> Arena:
        """The arena of a weights tag, ``weights/<tag>``, in host or device memory."""
        owner = f"weights/{tag}"
        return DeviceArena(size_bytes) if owner in self.on_device else self.take(owner, size_bytes)
