"""Sequences that lie back to back in one row without padding, and attention that keeps them apart."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor
from torch.nn import functional

from trainer.megatron.context_parallel import ContextCut, seen_of_all_ranks

_LARGEST_FLASH_HEAD = 256


@dataclass
class PackedSequences(PackedSeqParams):
    """Megatron's description of the row [1, t] (format ``thd``), and what our own layers need beside. Where ranks share
    sequences, t tokens are this rank's, and each of the two chunks that it has of a sequence stands for one, whose
    queries see more keys than there are queries.

    Attributes:
        lengths, key_lengths: of every sequence, in order; the lengths add up to t.
        positions: [t] int64, of every token in its sequence.
        sources: of the keys where ranks share sequences, see :class:`ContextCut`; None: all are this rank's own.
    """

    lengths: tuple[int, ...] = ()
    key_lengths: tuple[int, ...] = ()
    positions: Tensor = None  # type: ignore[assignment]
    sources: Tensor | None = None

    @classmethod
    def of(cls, lengths: tuple[int, ...], *, device: Any, cut: ContextCut | None = None) -> PackedSequences:
        """Those of ``lengths``, none of which is 0, or what a rank has of them."""
        sizes = torch.tensor(lengths)
        positions = torch.arange(sum(lengths)) - (sizes.cumsum(0) - sizes).repeat_interleave(sizes)
        queries, keys = (lengths, lengths) if cut is None else (cut.lengths, cut.key_lengths)
        return cls(
            qkv_format="thd",
            cu_seqlens_q=_starts(queries).to(device),
            cu_seqlens_kv=_starts(keys).to(device),
            max_seqlen_q=max(queries),
            max_seqlen_kv=max(keys),
            lengths=queries,
            key_lengths=keys,
            positions=(positions if cut is None else positions[cut.places]).to(device),
            sources=None if cut is None else cut.sources.to(device),
        )

    def seen(self, own: Tensor) -> Tensor:
        """Keys or values [t, kv_heads, d] -> those that the sequences' queries see, in the order of these."""
        return own if self.sources is None else seen_of_all_ranks(own, self.sources)


def _starts(lengths: tuple[int, ...]) -> Tensor:
    return functional.pad(torch.tensor(lengths).cumsum(0), (1, 0)).int()


def packed_attention(query: Tensor, key: Tensor, value: Tensor, packed: PackedSequences) -> Tensor:
    """Causal attention within each sequence: query [t, heads, d], key and value [t, kv_heads, d] -> [t, heads * d].
    Collective where ranks share sequences.

    On a GPU one call of flash attention with cumulative lengths, in 16 bits and for heads that it takes; elsewhere
    ``scaled_dot_product_attention`` of one sequence after the other.
    """
    size = query.shape[-1]
    has_16_bits = query.dtype in (torch.bfloat16, torch.float16)
    if query.is_cuda and has_16_bits and size % 8 == 0 and size <= _LARGEST_FLASH_HEAD:
        return _Flash.apply(query, key, value, packed).flatten(1)
    keys = (packed.seen(states).split(packed.key_lengths) for states in (key, value))
    return torch.cat([_one_sequence(*states) for states in zip(query.split(packed.lengths), *keys, strict=True)])


def _one_sequence(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """The last query sees all keys, one before it all but the last, and so on."""
    mask, hidden = None, len(key) - len(query)
    if hidden:  # torch would align the first query with the first key
        mask = torch.ones(len(query), len(key), dtype=torch.bool, device=query.device).tril(hidden)
    query, key, value = (states.transpose(0, 1)[None] for states in (query, key, value))
    how = {"attn_mask": mask, "is_causal": mask is None, "enable_gqa": True}
    attended = functional.scaled_dot_product_attention(query, key, value, **how)
    return attended[0].transpose(0, 1).flatten(1)


class _Flash(torch.autograd.Function):
    """torch's own flash attention, whose varlen wrapper takes other arguments in every version. Its causal mask lets
    the last query see all keys. Keys of other ranks are not kept for the backward pass, but gathered once more."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, packed: PackedSequences) -> Tensor:
        out, log_sums, random_state, unused, _ = torch.ops.aten._flash_attention_forward(
            query, packed.seen(key), packed.seen(value), *_bounds(packed), 0.0, True, False
        )
        ctx.save_for_backward(query, key, value, out, log_sums, random_state, unused)
        ctx.packed = packed
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        query, *own, out, log_sums, random_state, unused = ctx.saved_tensors
        with torch.enable_grad():
            own = [states.detach().requires_grad_() for states in own]
            seen = [ctx.packed.seen(states) for states in own]
        of_query, *of_seen = torch.ops.aten._flash_attention_backward(
            gradient.contiguous(),
            *(query, *(states.detach() for states in seen), out, log_sums, *_bounds(ctx.packed)),
            *(0.0, True, random_state, unused),
        )
        return of_query, *torch.autograd.grad(seen, own, of_seen), None


def _bounds(packed: PackedSequences) -> tuple[Tensor, Tensor, int, int]:
    return packed.cu_seqlens_q, packed.cu_seqlens_kv, packed.max_seqlen_q, packed.max_seqlen_kv
