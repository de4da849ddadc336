"""How a rank's sequences are split into micro-batches: so many at a time, or under a token budget, by length or packed.

By length, sequences that are about equally long share a micro-batch, whose columns end with its longest sequence: short
ones are computed with little padding, and many of them at once. Packed, sequences lie back to back without any, and
micro-batches cost about the same, with their attention, which grows with the square of a length. No way changes a
mean, since losses are sums that are divided by a global count. Every data-parallel rank runs the same number of
micro-batches, as Megatron's schedules and its overlapped communication expect.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from trainer.common.multiples import LENGTH_MULTIPLE, divide_up, round_up
from trainer.config.schema import Config
from trainer.data.batch import Sequences, SequencesT
from trainer.megatron.groups import max_over_ranks
from trainer.models.flops import break_even_length


@dataclass(frozen=True)
class Split:
    """How a pass splits its batch.

    Attributes:
        micro_batch_size: sequences of a micro-batch, where there is no ``micro_batch_tokens``.
        micro_batch_tokens: instead, sequences of like length, at most so many tokens of them with padding; a single
            longer sequence is a micro-batch of its own. Longest first, so that memory peaks at once.
        break_even: sequences, of any lengths, are packed; attention over a sequence of so many tokens costs as much as
            all else about it. None: they are padded.
        minibatches: group the rows of each of so many equal chunks apart. A forward pass over a whole batch then has
            the very micro-batches that training on its minibatches will have, and computes the same bits.
    """

    micro_batch_size: int
    micro_batch_tokens: int | None = None
    minibatches: int = 1
    break_even: float | None = None

    @classmethod
    def of_training(cls, config: Config) -> Split:
        """How training splits a minibatch, whichever role's, as befits the actor."""
        break_even = break_even_length(config.roles["actor"].model) if config.training.packing else None
        return cls(config.algo.micro_batch_size, config.algo.micro_batch_tokens, break_even=break_even)

    @classmethod
    def of_scoring(cls, config: Config) -> Split:
        """How a forward pass splits the whole batch of a step."""
        return replace(cls.of_training(config), minibatches=config.algo.minibatches)

    @property
    def packs(self) -> bool:
        return self.break_even is not None


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
        for group in _groups(own, split, token_budget=split.micro_batch_tokens):
            rows = torch.tensor(group, device=batch.tokens.device) + start
            found.append(MicroBatch(rows, min(_padded(max(own[row] for row in group)), columns)))
    return found


def _groups(lengths: Sequence[int], split: Split, *, token_budget: int) -> list[list[int]]:
    if split.break_even is None:
        groups = group_by_length(lengths, token_budget=token_budget)
        return split_to_count(groups, count=max_over_ranks(len(groups)), size=partial(_padded_tokens, lengths))
    groups = pack(lengths, token_budget=token_budget, break_even=split.break_even)
    count = max_over_ranks(len(groups))
    balanced = _balanced(lengths, count, token_budget=token_budget, break_even=split.break_even)
    return balanced or split_to_count(groups, count=count, size=lambda group: sum(lengths[row] for row in group))


def pack(lengths: Sequence[int], *, token_budget: int, break_even: float) -> list[list[int]]:
    """Row numbers in few groups of about the same cost, at most ``token_budget`` tokens each (or one longer sequence),
    the group with most tokens first."""
    count = min(len(lengths), max(1, divide_up(sum(lengths), token_budget)))
    while True:
        groups = _balanced(lengths, count, token_budget=token_budget, break_even=break_even)
        if groups is not None:
            return groups
        count += 1


def _balanced(lengths: Sequence[int], count: int, *, token_budget: int, break_even: float) -> list[list[int]] | None:
    """``count`` groups, the most costly sequences first and each to the cheapest group that has room (Graham's rule for
    equal machines, 1969); None if one finds no room."""
    groups: list[list[int]] = [[] for _ in range(count)]
    tokens, costs = [0] * count, [0.0] * count
    for row in sorted(range(len(lengths)), key=lambda row: -lengths[row]):
        length = lengths[row]
        with_room = [n for n in range(count) if not groups[n] or tokens[n] + length <= token_budget]
        if not with_room:
            return None
        chosen = min(with_room, key=lambda n: (costs[n], len(groups[n])))
        groups[chosen].append(row)
        tokens[chosen] += length
        costs[chosen] += length + length**2 / break_even
    return sorted(map(sorted, groups), key=lambda group: -sum(lengths[row] for row in group))


def group_by_length(lengths: Sequence[int], *, token_budget: int) -> list[list[int]]:
    """Row numbers, longest first, in as few groups as filling one after the other gives."""
    groups: list[list[int]] = []
    for row in sorted(range(len(lengths)), key=lambda row: -lengths[row]):
        if groups and (len(groups[-1]) + 1) * _padded(lengths[groups[-1][0]]) <= token_budget:
            groups[-1].append(row)
        else:
            groups.append([row])
    return groups


def split_to_count(groups: Sequence[list[int]], *, count: int, size: Callable[[list[int]], int]) -> list[list[int]]:
    """``count`` groups: the largest (of several rows) is halved until there are so many."""
    assert len(groups) <= count <= sum(map(len, groups)), (groups, count)
    groups = list(groups)
    while len(groups) < count:
        sizes = [size(group) if len(group) > 1 else -1 for group in groups]
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


def _padded_tokens(lengths: Sequence[int], group: list[int]) -> int:
    """Of a group, longest first, padding counted."""
    return len(group) * _padded(lengths[group[0]])


def _padded(length: int) -> int:
    return round_up(max(1, length), LENGTH_MULTIPLE)
