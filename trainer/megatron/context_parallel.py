"""Sequences that context-parallel ranks share: who computes which tokens, and where attention finds the others'.

A sequence is cut into 2 n chunks for n ranks, and rank r takes the chunks r and 2 n - 1 - r: an early one, which sees
little, and a late one, which sees much. So causal attention costs all ranks the same (as Megatron-LM cuts its batches
in ``get_batch_on_this_cp_rank``; Llama 3, arXiv:2407.21783 section 3.3.2). Of packed sequences each is cut by itself.

Before attention the ranks gather all keys and values, and after it they sum the gradients of these (Llama 3, same
place). A ring (arXiv:2310.01889) would hide its sends behind the products, for one partial softmax after the other,
which must be merged. The gathered ones, with grouped heads few beside the queries, need one collective, which gloo and
NCCL have alike, and any attention that takes more keys than queries.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from megatron.core.tensor_parallel.mappings import (
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
)
from torch import Tensor

from trainer.megatron.groups import context_parallel_group


def chunks_of_a_sequence() -> int:
    """Into so many equal chunks every sequence is cut: 1 where no ranks share it."""
    ranks = context_parallel_group().size()
    return 2 * ranks if ranks > 1 else 1


@dataclass(frozen=True)
class ContextCut:
    """What one of several ranks computes of sequences in a row of t tokens.

    Attributes:
        places: [t / ranks], its tokens' places in the row: of each sequence an early chunk and a late one.
        lengths: of these chunks, in order, two for each sequence.
        key_lengths: to each chunk, how many tokens of its sequence its last token sees, itself included.
        sources: [sum of key_lengths], of the keys that each chunk sees, one chunk's after the other's, the place in
            what all ranks hold, one rank's after the other's.
    """

    places: Tensor
    lengths: tuple[int, ...]
    key_lengths: tuple[int, ...]
    sources: Tensor

    @classmethod
    def of(cls, lengths: Sequence[int], *, rank: int, ranks: int) -> ContextCut:
        """That of rank ``rank``; every length is a multiple of 2 * ranks."""
        assert all(length % (2 * ranks) == 0 for length in lengths), (lengths, ranks)
        chunks = [length // (2 * ranks) for length in lengths for _ in range(2)]
        seen = [
            chunk * number for chunk, number in zip(chunks, (rank + 1, 2 * ranks - rank) * len(lengths), strict=True)
        ]
        starts = torch.tensor(lengths).cumsum(0) - torch.tensor(lengths)
        visible = [
            torch.arange(start, start + count)
            for start, count in zip(starts.repeat_interleave(2).tolist(), seen, strict=True)
        ]
        held = torch.cat([_places(lengths, rank=other, ranks=ranks) for other in range(ranks)])
        return cls(
            places=_places(lengths, rank=rank, ranks=ranks),
            lengths=tuple(chunks),
            key_lengths=tuple(seen),
            sources=held.argsort()[torch.cat(visible)],
        )


def context_cut(lengths: Sequence[int]) -> ContextCut | None:
    """What this rank computes of a row of sequences; None: all."""
    group = context_parallel_group()
    return None if group.size() == 1 else ContextCut.of(lengths, rank=group.rank(), ranks=group.size())


def _places(lengths: Sequence[int], *, rank: int, ranks: int) -> Tensor:
    places, start = [], 0
    for length in lengths:
        chunk = length // (2 * ranks)
        for number in (rank, 2 * ranks - 1 - rank):
            places.append(torch.arange(start + number * chunk, start + (number + 1) * chunk))
        start += length
    return torch.cat(places)


def seen_of_all_ranks(own: Tensor, sources: Tensor) -> Tensor:
    """[t / ranks, ...] of this rank's tokens -> [keys, ...] of those that its chunks see, see :class:`ContextCut`.
    Gradients are summed over the ranks. Collective, forward and backward, over the context-parallel ranks."""
    return gather_from_sequence_parallel_region(own, group=context_parallel_group()).index_select(0, sources)


def with_other_ranks(numbers: Tensor) -> Tensor:
    """Numbers of which each of the ranks that share sequences has its own ones, and zeros in the places of the
    others' -> all of them, on every rank. All compute the same loss of these; the gradient of a rank's own numbers is
    that of one loss. Collective over the context-parallel ranks."""
    group = context_parallel_group()
    return numbers if group.size() == 1 else reduce_from_tensor_model_parallel_region(numbers, group=group)


def counted_once(count: Tensor) -> Tensor:
    """The count of a loss that all context-parallel ranks have computed alike, for Megatron, which adds it up over
    them: 0 on all of them but the first."""
    return count if context_parallel_group().rank() == 0 else torch.zeros_like(count)
