"""How a rank's sequences are split into micro-batches: so many at a time, or by length, under a token budget.

By length, sequences that are about equally long share a micro-batch, whose columns end with its longest sequence: short
ones are computed with little padding, and many of them at once. Neither way changes a mean, since losses are sums that
are divided by a global count. Every data-parallel rank runs the same number of micro-batches, as Megatron's schedules
and its overlapped communication expect.

Simplified: padding within a micro-batch stays; sequences are not packed into one row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from trainer.config.schema import AlgoConfig
from trainer.data.batch import Sequences, SequencesT
from trainer.megatron.groups import max_over_ranks

_LENGTH_MULTIPLE = 8


@dataclass(frozen=True)
class Split:
    """How a pass splits its batch.

    Attributes:
        micro_batch_size: sequences of a micro-batch, where there is no ``micro_batch_tokens``.
        micro_batch_tokens: instead, sequences of like length, at most so many tokens of them with padding; a single
            longer sequence is a micro-batch of its own. Longest first, so that memory peaks at once.
        minibatches: group the rows of each of so many equal chunks apart. A forward pass over a whole batch then has
            the very micro-batches that training on its minibatches will have, and computes the same bits.
    """

    micro_batch_size: int
    micro_batch_tokens: int | None = None
    minibatches: int = 1

    @classmethod
    def of_training(cls, settings: AlgoConfig) -> Split:
        """How training splits a minibatch."""
        return cls(settings.micro_batch_size, settings.micro_batch_tokens)

    @classmethod
    def of_scoring(cls, settings: AlgoConfig) -> Split:
        """How a forward pass splits the whole batch of a step."""
        return cls(settings.micro_batch_size, settings.micro_batch_tokens, settings.minibatches)


@dataclass(frozen=True)
class MicroBatch:
    """Some rows of a batch, cut to the first ``columns`` of ``tokens``."""

    rows: Tensor | slice
    columns: int

    def take(self, batch: SequencesT) -> SequencesT:
        return batch.select(self.rows).cut(self.columns)


def micro_batches(batch: Sequences, split: Split) -> list[MicroBatch]:
    """The micro-batches of a rank's batch; together they cover every row once. By length, this is collective over the
    data-parallel ranks, which must have equally many rows."""
    n, columns = batch.tokens.shape
    if split.micro_batch_tokens is None:
        size = split.micro_batch_size
        return [MicroBatch(slice(start, start + size), columns) for start in range(0, n, size)]
    lengths: list[int] = batch.lengths().tolist()
    found = []
    for chunk in torch.arange(n).chunk(split.minibatches):
        start, own = int(chunk[0]), lengths[int(chunk[0]) : int(chunk[-1]) + 1]
        groups = group_by_length(own, token_budget=split.micro_batch_tokens)
        for group in split_to_count(groups, count=max_over_ranks(len(groups)), lengths=own):
            rows = torch.tensor(group, device=batch.tokens.device) + start
            found.append(MicroBatch(rows, min(_padded(own[group[0]]), columns)))
    return found


def group_by_length(lengths: Sequence[int], *, token_budget: int) -> list[list[int]]:
    """Row numbers, longest first, in as few groups as filling one after the other gives."""
    groups: list[list[int]] = []
    for row in sorted(range(len(lengths)), key=lambda row: -lengths[row]):
        if groups and (len(groups[-1]) + 1) * _padded(lengths[groups[-1][0]]) <= token_budget:
            groups[-1].append(row)
        else:
            groups.append([row])
    return groups


def split_to_count(groups: Sequence[list[int]], *, count: int, lengths: Sequence[int]) -> list[list[int]]:
    """``count`` groups: the one with most tokens (padding counted) is halved until there are so many."""
    assert len(groups) <= count <= len(lengths), (len(groups), count, len(lengths))
    groups = list(groups)
    while len(groups) < count:
        sizes = [len(group) * _padded(lengths[group[0]]) if len(group) > 1 else 0 for group in groups]
        largest = sizes.index(max(sizes))
        group = groups[largest]
        middle = (len(group) + 1) // 2
        groups[largest : largest + 1] = [group[:middle], group[middle:]]
    return groups


def in_order(results: Sequence[Tensor], parts: Sequence[MicroBatch], *, batch: Sequences) -> Tensor:
    """Per-token results of micro-batches as one tensor over the batch, zero where they were cut.

    Args:
        results: of each of ``parts``, [rows, columns, ...] or, aligned with ``response_mask``, one column less.
    """
    n, columns = batch.tokens.shape
    columns += results[0].shape[1] - parts[0].columns
    whole = results[0].new_zeros(n, columns, *results[0].shape[2:])
    for result, part in zip(results, parts, strict=True):
        whole[part.rows, : result.shape[1]] = result
    return whole


def _padded(length: int) -> int:
    return max(1, -(-length // _LENGTH_MULTIPLE)) * _LENGTH_MULTIPLE
