"""Sequences that lie back to back in one row without padding, and attention that keeps them apart."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor
from torch.nn import functional

_LARGEST_FLASH_HEAD = 256


@dataclass
class PackedSequences(PackedSeqParams):
    """Megatron's description of the row [1, t] (format ``thd``), and what our own layers need beside.

    Attributes:
        lengths: of every sequence, in order; they add up to t.
        positions: [t] int64, of every token in its sequence.
    """

    lengths: tuple[int, ...] = ()
    positions: Tensor = None  # type: ignore[assignment]

    @classmethod
    def of(cls, lengths: tuple[int, ...], *, device: Any) -> PackedSequences:
        """Those of ``lengths``, none of which is 0."""
        size = torch.tensor(lengths, device=device)
        ends = size.cumsum(0)
        starts = functional.pad(ends, (1, 0)).int()
        positions = torch.arange(sum(lengths), device=device) - (ends - size).repeat_interleave(size)
        longest = max(lengths)
        return cls(
            qkv_format="thd",
            cu_seqlens_q=starts,
            cu_seqlens_kv=starts,
            max_seqlen_q=longest,
            max_seqlen_kv=longest,
            lengths=lengths,
            positions=positions,
        )


def packed_attention(query: Tensor, key: Tensor, value: Tensor, packed: PackedSequences) -> Tensor:
    """Causal attention within each sequence: query [t, heads, d], key and value [t, kv_heads, d] -> [t, heads * d].

    On a GPU one call of flash attention with cumulative lengths, in 16 bits and for heads that it takes; elsewhere
    ``scaled_dot_product_attention`` of one sequence after the other.
    """
    size = query.shape[-1]
    has_16_bits = query.dtype in (torch.bfloat16, torch.float16)
    if query.is_cuda and has_16_bits and size % 8 == 0 and size <= _LARGEST_FLASH_HEAD:
        return _Flash.apply(query, key, value, packed.cu_seqlens_q, packed.max_seqlen_q).flatten(1)
    parts = zip(*(states.split(packed.lengths) for states in (query, key, value)), strict=True)
    return torch.cat([_one_sequence(*states) for states in parts])


def _one_sequence(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    query, key, value = (states.transpose(0, 1)[None] for states in (query, key, value))
    attended = functional.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
    return attended[0].transpose(0, 1).flatten(1)


class _Flash(torch.autograd.Function):
    """torch's own flash attention, whose varlen wrapper takes other arguments in every version."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, starts: Tensor, longest: int) -> Tensor:
        out, log_sums, random_state, unused, _ = torch.ops.aten._flash_attention_forward(
            query, key, value, starts, starts, longest, longest, 0.0, True, False
        )
        ctx.save_for_backward(query, key, value, out, log_sums, starts, random_state, unused)
        ctx.longest = longest
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        query, key, value, out, log_sums, starts, random_state, unused = ctx.saved_tensors
        gradients = torch.ops.aten._flash_attention_backward(
            gradient.contiguous(),
            *(query, key, value, out, log_sums, starts, starts, ctx.longest, ctx.longest),
            *(0.0, True, random_state, unused),
        )
        return *gradients, None, None
