"""Bytes of live tensors, for tests that compare a plan with what a computation really holds. On the CPU."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter


class TensorMemory(TorchDispatchMode):
    """Inside, ``live_bytes`` of the storages that operations have made, and ``peak_bytes``, the most that were so."""

    def __init__(self) -> None:
        super().__init__()
        self.live_bytes = self.peak_bytes = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {id_of(t) for t in tree_iter((args, kwargs)) if isinstance(t, torch.Tensor)}
        result = function(*args, **(kwargs or {}))
        for tensor in tree_iter(result):
            if isinstance(tensor, torch.Tensor) and id_of(tensor) not in given | self._known:
                self._add(tensor.untyped_storage())
        return result

    def _add(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        self._known.add(key)
        self.live_bytes += size
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        weakref.finalize(storage, self._remove, key, size)

    def _remove(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.live_bytes -= size


def id_of(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata
