"""Attention of packed prompts and of one new token per row over its paged keys and values, with what torch has.

    CUDA, 16 bits, torch.nn.attention.varlen with block tables (2.13): pages of 256 tokens
    CUDA, 16 bits, older torch: its flash attention with ``seqused_k``, which has no block tables: a row is one page
    everything else: batched matrix products over the gathered pages

t tokens in a pass, n rows, g key-value heads, m query heads for each of them, d elements per head.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from trainer.common.multiples import divide_up
from trainer.rollout.native.cache import has_block_tables


@dataclass(frozen=True)
class Prompts:
    """The prompts of one pass, packed one after the other: that of sequence i is tokens[starts[i] : starts[i + 1]].

    Attributes:
        starts: [sequences + 1] int32.
        longest: tokens of the longest one.
        tokens: of all of them; a pass may have more, which belong to no sequence.
    """

    starts: Tensor
    longest: int
    tokens: int


@dataclass(frozen=True)
class Rows:
    """The rows of one decoding step.

    Attributes:
        pages: [n, pages per row] int32, each row's pages in order.
        used: [n] int32, keys of a row, that of its new token included.
        longest: no row has more keys than this.
    """

    pages: Tensor
    used: Tensor
    longest: int


class Attention(Protocol):
    """One way to compute it."""

    def of_prompts(self, query: Tensor, key: Tensor, value: Tensor, prompts: Prompts) -> Tensor:
        """Causal attention within each prompt: query [t, g * m, d], key and value [t, g, d] -> [t, g * m * d]."""
        ...

    def of_rows(self, query: Tensor, cache: Tensor, rows: Rows) -> Tensor:
        """query [n, g * m, d], cache [pages, page_tokens, g, 2, d] (keys, then values) -> [n, g * m * d]."""
        ...


def choose(*, device: torch.device, dtype: torch.dtype) -> Attention:
    """The fastest attention that the device has for ``dtype``; :mod:`.cache` gives it its pages."""
    if device.type != "cuda" or dtype != torch.bfloat16:
        return Products()
    return PagedFlash() if has_block_tables() else SlottedFlash()


class Products:
    """Plain matrix products, one for each key-value head: its keys are read once for all of its query heads."""

    def of_prompts(self, query: Tensor, key: Tensor, value: Tensor, prompts: Prompts) -> Tensor:
        columns, extra = torch.arange(prompts.longest, device=query.device), len(query) - prompts.tokens
        first, end = prompts.starts[:-1, None], prompts.starts[1:, None]
        is_real = first + columns < end  # [sequences, longest]
        source = (first + columns).minimum(end - 1)  # padded on the right, with each prompt's own last token
        query, key, value = (states[source].transpose(1, 2) for states in (query, key, value))
        attended = functional.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        packed = attended.transpose(1, 2)[is_real].flatten(1)
        return functional.pad(packed, (0, 0, 0, extra)) if extra else packed

    def of_rows(self, query: Tensor, cache: Tensor, rows: Rows) -> Tensor:
        n, (_, page_tokens, groups, _, size) = len(query), cache.shape
        pages = rows.pages[:, : divide_up(rows.longest, page_tokens)]
        held = cache[pages].flatten(1, 2)[:, : rows.longest].permute(3, 0, 2, 1, 4).float()  # [2, n, g, keys, d]
        scores = query.view(n, groups, -1, size).float() @ held[0].transpose(-1, -2) * size**-0.5
        is_hidden = torch.arange(scores.shape[-1], device=query.device) >= rows.used[:, None]
        weights = scores.masked_fill_(is_hidden[:, None, None], -torch.inf).softmax(dim=-1)
        return (weights @ held[1]).to(query.dtype).flatten(1)


class _Flash:
    def of_prompts(self, query: Tensor, key: Tensor, value: Tensor, prompts: Prompts) -> Tensor:
        longest, starts = prompts.longest, prompts.starts
        attended = torch.ops.aten._flash_attention_forward(
            query, key, value, starts, starts, longest, longest, 0.0, True, False
        )[0]
        return attended.flatten(1)


class SlottedFlash(_Flash):
    """torch's flash attention before it had block tables: a row's keys lie in one page."""

    def of_rows(self, query: Tensor, cache: Tensor, rows: Rows) -> Tensor:
        n = len(query)
        flat = cache.flatten(0, 1)
        # With seqused_k the kernel takes these for where each row's keys begin; nothing reads the last.
        key_starts = functional.pad(rows.pages[:, 0] * cache.shape[1], (0, 1))
        query_starts = torch.arange(n + 1, device=query.device, dtype=torch.int32)
        attended = torch.ops.aten._flash_attention_forward(
            query,
            flat[:, :, 0],
            flat[:, :, 1],
            query_starts,
            key_starts,
            1,
            rows.longest,
            0.0,
            False,
            False,
            seqused_k=rows.used,
        )[0]
        return attended.flatten(1)


class PagedFlash(_Flash):
    """``torch.nn.attention.varlen`` with block tables."""

    def of_rows(self, query: Tensor, cache: Tensor, rows: Rows) -> Tensor:
        from torch.nn.attention.varlen import varlen_attn

        attended = varlen_attn(
            query,
            cache[:, :, :, 0],
            cache[:, :, :, 1],
            torch.arange(len(query) + 1, device=query.device, dtype=torch.int32),
            None,
            1,
            rows.longest,
            enable_gqa=True,
            seqused_k=rows.used,
            block_table=rows.pages,
        )
        assert isinstance(attended, Tensor)
        return attended.flatten(1)
