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
from trainer.megatron.heads import log_probs_and_entropy
from trainer.megatron.packing import PackedSequences


@dataclass(frozen=True)
class Packing:
    """Of sequences in one row [1, t].

    Attributes:
        columns: the place in n * s of every packed token, in order.
        sequence_of: [t], the number of each token's sequence; n for padding.
    """

    sequences: PackedSequences
    columns: Tensor
    sequence_of: Tensor


@dataclass(frozen=True)
class ModelInput:
    """n sequences of s columns.

    Attributes:
        tokens: [b, t], what the model is called with.
        positions: [b, t].
        shape: (n, s).
        places: [m], of every response token in n * (s-1), in that order.
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
        n, columns = batch.tokens.shape
        lengths = batch.lengths()
        is_packed = torch.arange(columns, device=lengths.device) < lengths[:, None]
        columns_of = is_packed.flatten().nonzero().squeeze(1)
        extra = -len(columns_of) % multiple if len(columns_of) else multiple
        sizes = [*filter(None, lengths.tolist()), *([extra] if extra else [])]
        sequences = PackedSequences.of(tuple(sizes), device=lengths.device)
        places = batch.response_mask.flatten().nonzero().squeeze(1)
        sequence, column = places // (columns - 1), places % (columns - 1)
        return cls(
            tokens=functional.pad(batch.tokens.flatten()[columns_of], (0, extra))[None],
            positions=sequences.positions[None],
            shape=(n, columns),
            places=places,
            rows=(lengths.cumsum(0) - lengths)[sequence] + column,
            targets=batch.tokens[:, 1:].flatten()[places],
            packing=Packing(sequences, columns_of, functional.pad(columns_of // columns, (0, extra), value=n)),
        )

    @property
    def options(self) -> dict[str, Any]:
        """What the model is called with beside tokens and positions."""
        return {} if self.packing is None else {"packed_seq_params": self.packing.sequences}

    def by_response_token(self, numbers: Tensor) -> Tensor:
        """[m], one of each response token -> [n, s-1], zero elsewhere."""
        n, columns = self.shape
        return numbers.new_zeros(n * (columns - 1)).index_copy(0, self.places, numbers).view(n, columns - 1)

    def by_column(self, output: Tensor) -> Tensor:
        """[b, t] -> [n, s], zero where nothing was packed."""
        if self.packing is not None:
            n, columns = self.shape
            places = self.packing.columns
            whole = output.new_zeros(n * columns).index_copy(0, places, output[0, : len(places)])
            return whole.view(n, columns)
        return output[:, : self.shape[1]]


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
