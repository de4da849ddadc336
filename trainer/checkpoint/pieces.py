"""Which rectangles of a whole tensor a rank holds, in the words of torch.distributed.checkpoint (DCP).

DCP saves rectangles and, when it loads, reads those that overlap with the ones that are asked for: so neither the
parallel layout nor the cut of the optimizer state needs to be that of the ranks that saved. Megatron hands out flat
ranges of tensors that tensor parallelism has cut before; in the whole tensor such a range is a few rectangles.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.checkpoint import ChunkStorageMetadata
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from trainer.common.multiples import round_up
from trainer.megatron.sharding import Sharding, Share, own_cut, sharding_of

Rectangle = tuple[tuple[int, ...], tuple[int, ...]]  # offsets, sizes


@dataclass(frozen=True)
class Pieces:
    """A whole tensor of which this rank holds some rectangles. Follows the protocol of what DCP can save and load
    (``torch/distributed/_checkpointable.py``).

    Attributes:
        shape: of the whole tensor.
        held: offsets in the whole tensor -> the rectangle that begins there.
    """

    shape: torch.Size
    held: Mapping[torch.Size, Tensor]

    def size(self) -> torch.Size:
        """By which DCP checks a tensor that it loads."""
        return self.shape

    def __create_write_items__(self, fqn: str, _: object) -> list[WriteItem]:
        return [
            WriteItem(
                index=MetadataIndex(fqn, offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk=ChunkStorageMetadata(offsets=offsets, sizes=tensor.shape),
                    properties=TensorProperties(dtype=tensor.dtype),
                    size=self.shape,
                ),
            )
            for offsets, tensor in self.held.items()
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(offsets=offsets, sizes=tensor.shape) for offsets, tensor in self.held.items()]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        assert index.offset is not None
        return self.held[index.offset]


def pieces_of(share: Share, kind: str, *, model_tensor: Tensor) -> Pieces:
    """``share.tensors[kind]`` as views of it in the whole tensor, of which this rank's model has ``model_tensor``."""
    sharding = sharding_of(model_tensor)
    rank, ranks = own_cut()
    held = rectangles_of(
        share.tensors[kind], start=share.start, part_shape=model_tensor.shape, sharding=sharding, rank=rank, ranks=ranks
    )
    return Pieces(torch.Size(sharding.whole_shape(model_tensor.shape)), dict(held))


def rectangles_of(
    flat: Tensor, *, start: int, part_shape: Sequence[int], sharding: Sharding, rank: int, ranks: int
) -> Iterator[tuple[torch.Size, Tensor]]:
    """(offsets in the whole tensor, a view of ``flat``) of what a range of a rank's part is in the whole tensor.

    Args:
        flat: [n], elements [start, start + n) of the flattened part.
        part_shape: of the part that ``sharding`` gives rank ``rank`` of ``ranks``; its padding is left out.
    """
    position = 0
    for offsets, sizes in rectangles(part_shape, start, start + flat.numel()):
        rectangle = flat[position : position + math.prod(sizes)].view(sizes)
        position += rectangle.numel()
        if sharding.dim is None:
            yield torch.Size(offsets), rectangle
            continue
        dim, first = sharding.dim, offsets[sharding.dim]
        for there, here, length in sharding.in_whole(first, sizes[dim], rank=rank, ranks=ranks):
            yield (
                torch.Size([*offsets[:dim], there, *offsets[dim + 1 :]]),
                rectangle.narrow(dim, here - first, length),
            )


def rectangles(shape: Sequence[int], start: int, stop: int) -> Iterator[Rectangle]:
    """Elements [start, stop) of a flattened tensor as rectangles of it, in order: the end of a row, whole rows, and the
    beginning of a row, a row being what one index of the first dimension holds."""
    if start == stop:
        return
    if not shape:
        yield (), ()
        return
    row = math.prod(shape[1:])
    whole_rows = (round_up(start, row), stop // row * row)
    edges = {start, stop} if whole_rows[0] > whole_rows[1] else {start, *whole_rows, stop}
    for first, last in itertools.pairwise(sorted(edges)):
        index, within = divmod(first, row)
        if within == 0 and last % row == 0:
            yield (index, *(0 for _ in shape[1:])), ((last - first) // row, *shape[1:])
        else:
            for offsets, sizes in rectangles(shape[1:], within, within + last - first):
                yield (index, *offsets), (1, *sizes)
