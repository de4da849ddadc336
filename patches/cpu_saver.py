"""torch_memory_saver's semantics in ordinary host memory, so that sleeping can be run and tested without a GPU.

Target: ``torch_memory_saver.torch_memory_saver._impl`` (the object behind ``region``, ``pause`` and ``resume``).
Why: torch_memory_saver's own implementation needs the CUDA driver.
How: inside a region every new CPU storage is moved into private anonymous mmaps that belong to the region's tag.
    ``pause`` copies those with a backup and gives the pages back to the kernel (MADV_DONTNEED), so RSS falls by
    released minus backed-up bytes; ``resume`` restores the copies and, with ``poison``, fills all other blocks with
    0xFF bytes (NaN as bf16 and fp32, -1 as an integer), so that a byte nobody restored is seen by every test.
Upstream: torch_memory_saver is for GPUs only, by design.
Remove when: torch_memory_saver gains a CPU implementation.
"""

from __future__ import annotations

import ctypes
import mmap
import weakref
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter, tree_map

from patches.registry import Patch, Replacement

_SLAB_BYTES = 1 << 20  # small storages share slabs of this size; a larger one gets an mmap of its own
_ALIGNMENT_BYTES = 64  # other offsets change the summation order, and so the bits, of CPU kernels
_POISON_BYTE = 0xFF


def _round_up(value: int, unit: int) -> int:
    return -(-value // unit) * unit


def _copy_bytes(source: mmap.mmap, target: mmap.mmap, size_bytes: int) -> None:
    """Without the bytes object in between that slices of an mmap would make."""
    with memoryview(source) as from_, memoryview(target) as to:
        to[:size_bytes] = from_[:size_bytes]


class _Slab(mmap.mmap):
    """A private anonymous mmap out of which blocks are cut. It lives as long as a tensor uses one of its blocks."""

    used_bytes: int
    backup: mmap.mmap | None

    def __new__(cls, size_bytes: int) -> _Slab:
        size_bytes = _round_up(size_bytes, mmap.PAGESIZE)
        slab = super().__new__(cls, -1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        slab.used_bytes, slab.backup = 0, None
        return slab

    def __init__(self, size_bytes: int) -> None:
        pass

    def take(self, size_bytes: int) -> memoryview | None:
        start, end = self.used_bytes, self.used_bytes + size_bytes
        if end > len(self):
            return None
        self.used_bytes = _round_up(end, _ALIGNMENT_BYTES)
        return memoryview(self)[start:end]

    @property
    def address(self) -> int:
        return ctypes.addressof(ctypes.c_char.from_buffer(self))

    @property
    def resident_bytes(self) -> int:
        return _round_up(min(self.used_bytes, len(self)), mmap.PAGESIZE)


class _Region:
    """All slabs of one (tag, backup) pair."""

    def __init__(self, *, has_backup: bool) -> None:
        self.has_backup, self.asleep = has_backup, False
        self.slabs: weakref.WeakSet[_Slab] = weakref.WeakSet()
        self._open: _Slab | None = None

    def move_in(self, source: torch.Tensor) -> torch.Tensor:
        """A tensor of the same shape, strides and bytes as ``source``, with its storage in this region."""
        storage = source.untyped_storage()
        flat = torch.frombuffer(self._block(max(storage.nbytes(), 1)), dtype=torch.uint8)
        ctypes.memmove(flat.data_ptr(), storage.data_ptr(), storage.nbytes())
        moved = torch.empty(0, dtype=source.dtype)
        return moved.set_(flat.untyped_storage(), source.storage_offset(), source.shape, source.stride())

    def _block(self, size_bytes: int) -> memoryview:
        if size_bytes > _SLAB_BYTES // 4:
            block = self._new_slab(size_bytes).take(size_bytes)
        else:
            block = self._open.take(size_bytes) if self._open is not None else None
            if block is None:
                self._open = self._new_slab(_SLAB_BYTES)
                block = self._open.take(size_bytes)
        assert block is not None
        return block

    def _new_slab(self, size_bytes: int) -> _Slab:
        slab = _Slab(size_bytes)
        self.slabs.add(slab)
        return slab

    def pause(self) -> None:
        for slab in self.slabs:
            if self.has_backup:
                slab.backup = mmap.mmap(-1, slab.resident_bytes or 1, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
                _copy_bytes(slab, slab.backup, slab.resident_bytes)
            slab.madvise(mmap.MADV_DONTNEED)
        self.asleep = True

    def resume(self, *, poison: bool) -> None:
        for slab in self.slabs:
            if slab.backup is not None:
                _copy_bytes(slab.backup, slab, slab.resident_bytes)
                slab.backup.close()
                slab.backup = None
            elif poison:
                ctypes.memset(slab.address, _POISON_BYTE, slab.resident_bytes)
        self.asleep = False

    @property
    def resident_bytes(self) -> int:
        return sum(slab.resident_bytes for slab in self.slabs)


_moving: ContextVar[bool] = ContextVar("_moving", default=False)  # the innermost region is at work: outer ones wait


class _IntoRegion(TorchDispatchMode):
    """Moves every new CPU storage that an operator returns into a region; of nested regions the innermost gets it."""

    def __init__(self, region: _Region) -> None:
        super().__init__()
        self._region = region

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if _moving.get():
            return func(*args, **kwargs)
        token = _moving.set(True)
        try:
            return self._moved(func, func(*args, **kwargs), (args, kwargs))
        finally:
            _moving.reset(token)

    def _moved(self, func: Any, result: Any, arguments: Any) -> Any:
        known = {leaf.untyped_storage()._cdata for leaf in tree_iter(arguments) if isinstance(leaf, torch.Tensor)}
        if func is torch.ops.aten.lift_fresh.default:  # torch.tensor(...) shows its new storage as this argument
            known = set()

        def move_if_new(leaf: Any) -> Any:
            is_new = (
                isinstance(leaf, torch.Tensor)
                and leaf.device.type == "cpu"
                and leaf.layout == torch.strided
                and leaf.untyped_storage()._cdata not in known
            )
            return self._region.move_in(leaf) if is_new else leaf

        return tree_map(move_if_new, result)


class CpuMemorySaver:
    """Drop-in for torch_memory_saver's ``_impl``. Pausing twice, resuming what is awake and allocating in a sleeping
    region are RuntimeErrors here; torch_memory_saver ends the process."""

    def __init__(self, *, poison: bool = True) -> None:
        self.poison = poison
        self._regions: dict[str, dict[bool, _Region]] = defaultdict(dict)

    @contextmanager
    def region(self, *, tag: str, enable_cpu_backup: bool, **_: Any) -> Iterator[None]:
        regions = self._regions[tag]
        if any(region.asleep for region in regions.values()):
            raise RuntimeError(f"region {tag} is asleep: nothing can be allocated in it")
        region = regions.setdefault(enable_cpu_backup, _Region(has_backup=enable_cpu_backup))
        with _IntoRegion(region):
            yield

    def _tagged(self, tag: str | None) -> list[tuple[str, _Region]]:
        tags = list(self._regions) if tag is None else [tag]
        return [(name, region) for name in tags for region in self._regions[name].values()]

    def pause(self, tag: str | None = None) -> None:
        """Release the memory of ``tag`` (of every tag, without one); all or, if one is asleep already, nothing."""
        regions = self._tagged(tag)
        for name, region in regions:
            if region.asleep:
                raise RuntimeError(f"region {name} is asleep already")
        for _, region in regions:
            region.pause()

    def resume(self, tag: str | None = None) -> None:
        """Bring the memory of ``tag`` back (of every tag, without one); all or, if one is awake already, nothing."""
        regions = self._tagged(tag)
        for name, region in regions:
            if not region.asleep:
                raise RuntimeError(f"region {name} is awake already")
        for _, region in regions:
            region.resume(poison=self.poison)

    def resident_bytes(self, tag: str, *, backup: bool | None = None) -> int:
        """Bytes of the pages that ``tag`` occupies while awake; with ``backup`` only of those with (without) one."""
        return sum(region.resident_bytes for _, region in self._tagged(tag) if backup in (None, region.has_backup))

    def region_of(self, tensor: torch.Tensor) -> tuple[str, bool] | None:
        """(tag, whether it has a backup) of the region that holds ``tensor``'s storage, None for ordinary memory."""
        address = tensor.untyped_storage().data_ptr()
        for name, region in self._tagged(None):
            if any(slab.address <= address < slab.address + len(slab) for slab in region.slabs):
                return name, region.has_backup
        return None

    def wait_for_device(self) -> None:
        """Nothing is queued on a CPU."""

    def check_room(self, tags: Sequence[str]) -> None:
        """Host memory is not checked: the kernel maps pages on demand."""

    def fill_with_poison(self, tag: str) -> None:
        """``resume`` has done it."""


def _replacements() -> list[Replacement]:
    from torch_memory_saver import torch_memory_saver

    return [(torch_memory_saver, "_impl", CpuMemorySaver())]


def _probe() -> tuple[str, str]:
    from torch_memory_saver import torch_memory_saver
    from torch_memory_saver.entrypoint import _TorchMemorySaverImpl

    if not hasattr(torch_memory_saver, "_impl"):
        return "CHANGED", "torch_memory_saver no longer keeps its implementation in _impl"
    missing = [name for name in ("region", "pause", "resume") if not hasattr(_TorchMemorySaverImpl, name)]
    if missing:
        return "CHANGED", f"torch_memory_saver's implementation has no {', '.join(missing)}"
    saver = CpuMemorySaver()
    with saver.region(tag="probe", enable_cpu_backup=True):
        kept = torch.ones(8)
    with saver.region(tag="probe", enable_cpu_backup=False):
        dropped = torch.ones(8)
    saver.pause("probe")
    saver.resume("probe")
    if not (kept.eq(1).all() and dropped.isnan().all()):
        return "CHANGED", "storages made inside a region did not land in it"
    return "OK", "applies"


PATCH = Patch(
    name="cpu_saver",
    target="torch_memory_saver.torch_memory_saver._impl",
    why="sleep and wake-up in host memory, for machines without a GPU",
    replacements=_replacements,
    probe=_probe,
)
