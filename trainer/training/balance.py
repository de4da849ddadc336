"""Sequences change data-parallel ranks, so that all ranks have about as much to compute.

Where micro-batches are packed, a rank whose responses happen to be long would let the others wait in every optimizer
step. So the sequences of a step are shared out by their cost, attention included. Each stays in its minibatch, and
every rank has as many as before. Advantages are computed where sequences were drawn, since those of one question
compare with each other; before and after, sequences move.

Simplified: every rank gets the sequences of all ranks for a moment.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, distributed
from torch.nn import functional

from trainer.data.batch import Sequences, SequencesT
from trainer.megatron.groups import data_parallel_group, data_parallel_rank, data_parallel_size, max_over_ranks
from trainer.training.micro_batches import Split


@dataclass(frozen=True)
class Exchange:
    """How the sequences of a step change ranks, and back.

    Attributes:
        sources: [ranks][n], for every row in the new order its number in the old one, rank * n + row; None: all stay.
        columns: of ``tokens``, as they were drawn on this rank.
    """

    sources: list[list[int]] | None
    columns: int

    @classmethod
    def of(cls, batch: Sequences, split: Split) -> Exchange:
        """That of a rank's ``batch``, all of whose ranks have equally many rows. Collective over the data-parallel
        ranks if sequences are packed."""
        columns = batch.tokens.shape[1]
        if not split.packs or data_parallel_size() == 1:
            return cls(None, columns)
        lengths = _of_all_ranks(batch.lengths()).view(data_parallel_size(), len(batch)).tolist()
        return cls(balanced(lengths, split), columns)

    def there(self, batch: SequencesT) -> SequencesT:
        """The sequences that this rank computes. Collective over the data-parallel ranks."""
        if self.sources is None:
            return batch
        columns = max_over_ranks(batch.tokens.shape[1])
        rows = torch.tensor(self.sources[data_parallel_rank()], device=batch.tokens.device)
        moved = {}
        for name, tensor in batch.tensors().items():
            extra = columns - batch.tokens.shape[1] if tensor.dim() == 2 else 0
            moved[name] = _of_all_ranks(functional.pad(tensor, (0, extra)) if extra else tensor)[rows]
        return dataclasses.replace(batch, **moved)

    def back(self, numbers: Tensor) -> Tensor:
        """[n, s], [n, s-1] or [n] of the sequences that this rank has computed -> the same of those that it has drawn.
        Collective over the data-parallel ranks."""
        if self.sources is None:
            return numbers
        order = torch.tensor(self.sources).flatten().argsort().view(len(self.sources), -1)
        own = _of_all_ranks(numbers)[order[data_parallel_rank()].to(numbers.device)]
        if own.dim() == 1:
            return own
        most = max_over_ranks(self.columns)
        return own[:, : own.shape[1] - (most - self.columns)]


def balanced(lengths: Sequence[Sequence[int]], split: Split) -> list[list[int]]:
    """Every rank's rows, as :attr:`Exchange.sources` has them: the most costly sequences first, each to the rank with
    the least to do that has room (Graham's rule for equal machines, 1969).

    Args:
        lengths: [ranks][n].
    """
    assert split.break_even is not None
    ranks, n = len(lengths), len(lengths[0])
    sources: list[list[int]] = [[] for _ in range(ranks)]
    for chunk in torch.arange(n).chunk(split.minibatches):
        rows = [(rank, int(row)) for rank in range(ranks) for row in chunk]
        costs, shares = [0.0] * ranks, [list[int]() for _ in range(ranks)]
        for rank, row in sorted(rows, key=lambda place: -lengths[place[0]][place[1]]):
            length = lengths[rank][row]
            with_room = [other for other in range(ranks) if len(shares[other]) < len(chunk)]
            chosen = min(with_room, key=lambda other: (costs[other], len(shares[other])))
            shares[chosen].append(rank * n + row)
            costs[chosen] += length + length**2 / split.break_even
        for share, own in zip(shares, sources, strict=True):
            own += sorted(share)
    return sources


def _of_all_ranks(tensor: Tensor) -> Tensor:
    """The rows of all data-parallel ranks, one rank's after the other's; every rank passes the same shape."""
    sent = (tensor.to(torch.uint8) if tensor.dtype == torch.bool else tensor).contiguous()
    parts = [torch.empty_like(sent) for _ in range(data_parallel_size())]
    distributed.all_gather(parts, sent, group=data_parallel_group())
    return torch.cat(parts).to(tensor.dtype)
