"""Each data-parallel rank's share of a model's parameters, cut where the distributed optimizer cuts them.

Megatron's DDP lays parameters into buckets and gives every data-parallel rank one n-th of each bucket. Ranks that fill
their n-th, and let Megatron all-gather the buckets in place as after an optimizer step, have the whole parameters. What
lies in no bucket (frozen parameters, module buffers) is not shared: every rank has it whole.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, distributed

from trainer.megatron.sharding import Chunk, named_tensors


@dataclass(frozen=True)
class _Cuts:
    """Rank r of ``group`` holds the elements [bounds[r], bounds[r + 1]) of the flattened parameter."""

    group: Any
    bounds: tuple[int, ...]
    shape: torch.Size


class ParamShards:
    """How the ranks share the tensors of ``chunks``; the layout of a :class:`trainer.roles.backuper.TensorBackuper`.

    Args:
        chunks: of Megatron's DDP with the distributed optimizer, dense and expert buffers alike.
    """

    def __init__(self, chunks: Sequence[Chunk]) -> None:
        self._chunks = chunks
        cuts = {id(param): found for chunk in chunks for param, found in _cuts_of(chunk)}
        self._cuts = {name: cuts[id(tensor)] for name, tensor in named_tensors(chunks) if id(tensor) in cuts}

    def own_part(self, name: str, tensor: Tensor) -> Tensor:
        """A view of what this rank holds of ``tensor``, a source tensor or another of its name and shape: [n] of a
        shared parameter (n may be 0), the tensor itself of all else."""
        if name not in self._cuts:
            return tensor
        rank, bounds = self._cuts[name].group.rank(), self._cuts[name].bounds
        return tensor.detach().view(-1)[bounds[rank] : bounds[rank + 1]]

    def start(self, name: str) -> int:
        """The first element of that part in the flattened tensor."""
        return self._cuts[name].bounds[self._cuts[name].group.rank()] if name in self._cuts else 0

    def complete(self) -> None:
        """Fill the parameters from what the ranks have written into their parts. Collective."""
        gather_params(self._chunks)

    def whole(self, name: str, part: Tensor) -> Tensor:
        """The whole host tensor from every rank's host ``part``. Collective over the tensor's data-parallel group."""
        if name not in self._cuts:
            return part
        cuts = self._cuts[name]
        flat = torch.empty(cuts.shape.numel(), dtype=part.dtype, device=torch.cuda.current_device())
        self.own_part(name, flat).copy_(part)
        for rank, (start, end) in enumerate(zip(cuts.bounds[:-1], cuts.bounds[1:], strict=True)):
            if start < end:
                distributed.broadcast(flat[start:end], group=cuts.group, group_src=rank)
        return flat.view(cuts.shape).cpu()


def gather_params(chunks: Sequence[Chunk]) -> None:
    """All-gather every bucket of the parameter buffers in place, from each rank's share. Collective."""
    for chunk in chunks:
        chunk.start_param_sync(force_sync=True)


def _cuts_of(chunk: Any) -> Iterator[tuple[Tensor, _Cuts]]:
    for buffer in chunk.buffers + chunk.expert_parallel_buffers:
        group = buffer.data_parallel_group
        for bucket in buffer.buckets:
            share = bucket.param_data.numel() // group.size()
            for param in bucket.params_list:
                start = param.storage_offset() - bucket.param_data.storage_offset()
                bounds = (min(max(rank * share - start, 0), param.numel()) for rank in range(group.size() + 1))
                yield param, _Cuts(group, tuple(bounds), param.shape)
