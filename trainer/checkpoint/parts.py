"""Reading what the ranks of one parallel layout saved as the parts that a rank of another layout holds.

Every file names tensors as in the whole model, and its header says which tensor-parallel rank of how many wrote it.
Where that number has not changed a rank reads what it needs and no more; otherwise it reads one whole tensor at a time.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from trainer.distributed import tensor_parallel_group
from trainer.models.sharding import Sharding, sharding_of
from trainer.optimizer import Share

_HEADER = "torpor"  # a single entry, since safetensors writes several in random order


def header(starts: Mapping[str, int] | None = None) -> dict[str, str]:
    """Of a file that this rank writes. ``starts``: of shares, name -> first element in the flattened part."""
    group = tensor_parallel_group()
    fields = {"tensor_parallel_rank": group.rank(), "tensor_parallel_ranks": group.size(), "starts": starts}
    return {_HEADER: json.dumps(fields)}


@dataclass(frozen=True)
class _File:
    """An open file and its header."""

    tensors: Any
    tensor_parallel_rank: int
    tensor_parallel_ranks: int
    starts: Mapping[str, int] | None


def _opened(paths: Iterable[Path]) -> Iterator[_File]:
    for path in paths:
        tensors = safe_open(path, "pt")
        yield _File(tensors, **json.loads(tensors.metadata()[_HEADER]))


class SavedWeights(Mapping[str, Tensor]):
    """This rank's part of every one of its tensors that is in ``files``, read when it is asked for.

    Args:
        own: the rank's tensors.
    """

    def __init__(self, files: Iterable[Path], *, own: Mapping[str, Tensor]) -> None:
        self._own, self._ranks = own, 1
        self._saved: dict[str, dict[int, Any]] = {}  # name -> tensor-parallel rank -> file
        for file in _opened(files):
            self._ranks = file.tensor_parallel_ranks
            for name in set(file.tensors.keys()) & own.keys():
                rank = _part_number(own[name], file.tensor_parallel_rank)
                self._saved.setdefault(name, {})[rank] = file.tensors

    def __getitem__(self, name: str) -> Tensor:
        saved = self._saved[name]
        return _own_part(sharding_of(self._own[name]), self._ranks, lambda rank: saved[rank].get_tensor(name))

    def __iter__(self) -> Iterator[str]:
        return (name for name in self._own if name in self._saved)

    def __len__(self) -> int:
        return sum(1 for _ in self)


@torch.no_grad()
def fill_shares(shares: Iterable[Share], files: Iterable[Path], *, own: Mapping[str, Tensor]) -> None:
    """Fill ``shares`` of the optimizer state from the shares in ``files``. Raises AssertionError where some lack."""
    pieces: dict[str, dict[int, dict[int, Any]]] = {}  # name -> tensor-parallel rank -> start -> file
    ranks = 1
    for file in _opened(files):
        ranks = file.tensor_parallel_ranks
        for name, start in (file.starts or {}).items():
            if name in own:  # what several ranks have saved, as without the distributed optimizer, is the same
                rank = _part_number(own[name], file.tensor_parallel_rank)
                pieces.setdefault(name, {}).setdefault(rank, {})[start] = file.tensors
    group = tensor_parallel_group()
    for share in shares:
        if ranks == group.size():
            of_rank = pieces[share.name][_part_number(own[share.name], group.rank())]
            filled = sum(_fill(share, saved, saved_start=start) for start, saved in of_rank.items())
            wanted = share.tensors["main"].numel()
            assert filled == wanted, f"{share.name}: {filled} of {wanted} elements are in the checkpoint"
        else:
            _fill_from_whole(share, pieces[share.name], ranks=ranks, own=own[share.name])


def _fill(share: Share, saved: Any, *, saved_start: int) -> int:
    """Copy what a file holds of the share into it -> how many elements of each tensor that was."""
    size = saved.get_slice(f"main/{share.name}").get_shape()[0]
    first = max(share.start, saved_start)
    count = min(share.start + share.tensors["main"].numel(), saved_start + size) - first
    if count <= 0:
        return 0
    for kind, tensor in share.tensors.items():
        part = saved.get_slice(f"{kind}/{share.name}")[first - saved_start : first - saved_start + count]
        tensor[first - share.start :][:count].copy_(part)
    return count


def _fill_from_whole(share: Share, pieces: Mapping[int, Mapping[int, Any]], *, ranks: int, own: Tensor) -> None:
    """Put each whole tensor together from all ranks' pieces, and copy the share out of this rank's part of it."""
    sharding = sharding_of(own)
    shape = sharding.part_shape(own.shape, ranks=ranks)
    for kind, tensor in share.tensors.items():

        def part_of(rank: int, kind: str = kind) -> Tensor:
            ordered = [saved for _, saved in sorted(pieces[rank].items(), key=lambda piece: piece[0])]
            return torch.cat([saved.get_tensor(f"{kind}/{share.name}") for saved in ordered]).view(shape)

        part = _own_part(sharding, ranks, part_of).reshape(-1)
        tensor.copy_(part[share.start : share.start + tensor.numel()])


def _part_number(own: Tensor, rank: int) -> int:
    """Which part of a tensor the tensor-parallel rank has: 0 of one that is not cut, whichever ranks wrote it."""
    return 0 if sharding_of(own).dim is None else rank


def _own_part(sharding: Sharding, saved_ranks: int, part_of: Callable[[int], Tensor]) -> Tensor:
    """This rank's part of a tensor of which ``part_of(rank)`` is a saved one."""
    group = tensor_parallel_group()
    if sharding.dim is None:
        return part_of(0)
    if saved_ranks == group.size():
        return part_of(group.rank())
    whole = sharding.join([part_of(rank) for rank in range(saved_ranks)])
    return sharding.part(whole, rank=group.rank(), ranks=group.size())
