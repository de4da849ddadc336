"""Sequences of a micro-batch as a model takes them, and what it gives as the losses take it.

Losses see [n, s-1] numbers of the response tokens, aligned with the response mask, however the sequences lay in the
model. Only the hidden states that predict a response token meet the output layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from megatron.core.models.gpt import GPTModel
from torch import Tensor
from torch.nn import functional

from trainer.data.batch import Sequences
from trainer.megatron.context_parallel import chunks_of_a_sequence, context_cut, with_other_ranks
from trainer.megatron.groups import tensor_parallel_group
from trainer.megatron.heads import log_probs_and_entropy
from trainer.megatron.packing import PackedSequences


@dataclass(frozen=True)
class Packing:
    """Of sequences in one row [1, t].

    Attributes:
        columns: the place in n * w of every packed token, in order; w are the columns of a sequence, with what makes
            them a number that ranks can share.
        sequence_of: [t], the number of each token's sequence; n for padding.
        width: w.
    """

    sequences: PackedSequences
    columns: Tensor
    sequence_of: Tensor
    width: int


@dataclass(frozen=True)
class ModelInput:
    """n sequences of s columns, or this rank's part of each, where ranks share sequences.

    Attributes:
        tokens: [b, t], what the model is called with.
        positions: [b, t].
        shape: (n, s).
        places: [m], of every response token in n * (s-1), in that order; of a part, those that it predicts.
        rows: [m], the place in b * t that predicts each of them.
        targets: [m], these tokens.
        packing: how sequences lie in one row, b = 1; None: each is a row.
    """

    tokens: Tensor
    positions: Tensor
    shape: tuple[int, int]
    places: Tensor
    rows: Tensor
    targets: Tensor
    packing: Packing | None = None

    @classmethod
    def of(cls, batch: Sequences, *, packs: bool) -> ModelInput:
        """As this rank's model takes ``batch``: packed or padded, or, where ranks share sequences, its part of either.
        Waits for the device."""
        tensor_parallel = tensor_parallel_group().size()  # sequence parallel: each rank takes equally many columns
        if chunks_of_a_sequence() > 1:
            lengths = batch.lengths() if packs else torch.full_like(batch.lengths(), batch.tokens.shape[1])
            return cls._in_one_row(batch, lengths, multiple=tensor_parallel)
        return (cls.packed if packs else cls.padded)(batch, multiple=tensor_parallel)

    @classmethod
    def padded(cls, batch: Sequences, *, multiple: int) -> ModelInput:
        """The sequences as they are; more padding makes their columns a multiple of ``multiple``, so that ranks can
        share them. Waits for the device."""
        n, columns = batch.tokens.shape
        tokens = functional.pad(batch.tokens, (0, -columns % multiple))
        places = batch.response_mask.flatten().nonzero().squeeze(1)
        sequence, column = places // (columns - 1), places % (columns - 1)
        return cls(
            tokens=tokens,
            positions=torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens),
            shape=(n, columns),
            places=places,
            rows=sequence * tokens.shape[1] + column,
            targets=batch.tokens[:, 1:].flatten()[places],
        )

    @classmethod
    def packed(cls, batch: Sequences, *, multiple: int) -> ModelInput:
        """The real tokens of all sequences in one row, up to and with the last response token of each (nothing of those
        that have none), and padding up to a ``multiple``, which is one sequence more. Waits for the device."""
        return cls._in_one_row(batch, batch.lengths(), multiple=multiple)

    @classmethod
    def _in_one_row(cls, batch: Sequences, lengths: Tensor, *, multiple: int) -> ModelInput:
        """The first ``lengths`` [n] tokens of the sequences, each padded so that it can be cut, or this rank's chunks
        of them; padding makes the row of every rank a ``multiple``."""
        (n, columns), chunks, device = batch.tokens.shape, chunks_of_a_sequence(), lengths.device
        tokens = functional.pad(batch.tokens, (0, -columns % chunks))
        width = tokens.shape[1]
        padded = (lengths + chunks - 1) // chunks * chunks
        in_row = (torch.arange(width, device=device) < padded[:, None]).flatten().nonzero().squeeze(1)
        extra = -len(in_row) % (multiple * chunks) if len(in_row) else multiple * chunks
        sizes = (*filter(None, padded.tolist()), *([extra] if extra else []))
        sequence_of = torch.where(in_row % width < batch.lengths()[in_row // width], in_row // width, n)
        tokens_in_row = functional.pad(tokens.flatten()[in_row], (0, extra))
        sequence_of = functional.pad(sequence_of, (0, extra), value=n)
        places = batch.response_mask.flatten().nonzero().squeeze(1)
        sequence, column = places // (columns - 1), places % (columns - 1)
        rows = (padded.cumsum(0) - padded)[sequence] + column
        targets = batch.tokens[:, 1:].flatten()[places]
        cut = context_cut(sizes)
        if cut is not None:
            own = cut.places.to(device)
            number = torch.full((sum(sizes),), -1, device=device).index_copy(
                0, own, torch.arange(len(own), device=device)
            )
            is_own = number[rows] >= 0
            places, rows, targets = places[is_own], number[rows[is_own]], targets[is_own]
            tokens_in_row, sequence_of, in_row = tokens_in_row[own], sequence_of[own], in_row[own[own < len(in_row)]]
        sequences = PackedSequences.of(sizes, device=device, cut=cut)
        return cls(
            tokens=tokens_in_row[None],
            positions=sequences.positions[None],
            shape=(n, columns),
            places=places,
            rows=rows,
            targets=targets,
            packing=Packing(sequences, in_row, sequence_of, width),
        )

    @property
    def options(self) -> dict[str, Any]:
        """What the model is called with beside tokens and positions."""
        return {} if self.packing is None else {"packed_seq_params": self.packing.sequences}

    def by_response_token(self, numbers: Tensor) -> Tensor:
        """[m], one of each response token -> [n, s-1], zero elsewhere. Collective where ranks share sequences: each
        gets what all have found."""
        n, columns = self.shape
        whole = numbers.new_zeros(n * (columns - 1)).index_copy(0, self.places, numbers)
        return with_other_ranks(whole).view(n, columns - 1)

    def by_column(self, output: Tensor) -> Tensor:
        """[b, t] -> [n, s], zero where nothing was packed. Collective where ranks share sequences, as above."""
        n, columns = self.shape
        if self.packing is not None:
            places, width = self.packing.columns, self.packing.width
            whole = output.new_zeros(n * width).index_copy(0, places, output[0, : len(places)])
            output = with_other_ranks(whole).view(n, width)
        return output[:, :columns]


class Reader(Protocol):
    """Reads numbers of tokens off what the last pipeline stage of a model gives."""

    def __call__(self, gpt: GPTModel, given: ModelInput, output: Tensor) -> Sequence[Tensor]: ...


@dataclass(frozen=True)
class TokenLogProbs:
    """Reads log-probs and entropies off an actor: two [n, s-1], zero where there is no response token.

    ``temperature``: the one that tokens are drawn with. ``vocab_size``: entries of the tokenizer.
    """

    temperature: float
    vocab_size: int

    def __call__(self, gpt: GPTModel, given: ModelInput, output: Tensor) -> tuple[Tensor, Tensor]:
        log_probs, entropy = log_probs_and_entropy(
            gpt,
            output,
            given.targets,
            rows=given.rows,
            temperature=self.temperature,
            vocab_size=self.vocab_size,
        )
        return given.by_response_token(log_probs), given.by_response_token(entropy)


def read_values(gpt: GPTModel, given: ModelInput, output: Tensor) -> tuple[Tensor]:
    """Reads a critic's values: [n, s] in fp32, column t that of the text up to and including tokens[:, t]."""
    return (given.by_column(output.squeeze(-1)).float(),)
