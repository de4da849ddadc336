"""Modules that replace parts of megatron-core's local layer spec.

The local spec's own parts need Apex or Transformer Engine for sequence parallelism and build the whole attention
matrix. These two compute with plain torch: RMSNorm as Hugging Face's Llama and Qwen do it, attention through
``scaled_dot_product_attention``. Where Transformer Engine is there, its attention can stand in for the latter.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from trainer.megatron.packing import PackedSequences, packed_attention


class RmsNorm(nn.Module):
    """Root-mean-square norm (arXiv:1910.07467) over the last dimension, statistics in fp32.

    The product with ``weight`` is taken after rounding back to the input's dtype, as in transformers.
    """

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(
            torch.ones(hidden_size, dtype=config.params_dtype, device=torch.cuda.current_device())
        )
        # Megatron sums the gradients of so marked parameters over the tensor-parallel ranks.
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, hidden: Tensor) -> Tensor:
        """``hidden`` [..., hidden_size] -> the same shape and dtype."""
        return self.weight * functional.rms_norm(hidden.float(), hidden.shape[-1:], eps=self.eps).to(hidden.dtype)


class CausalAttention(nn.Module):
    """Causal grouped-query attention without dropout; Megatron's core-attention interface.

    Batches are padded on the right, so causality alone keeps real tokens from seeing padding; packed sequences are kept
    apart.
    """

    def __init__(self, config: Any, **_: Any) -> None:
        super().__init__()

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *_: Any,
        packed_seq_params: PackedSequences | None = None,
        **__: Any,
    ) -> Tensor:
        """query [s, b, heads, d], key and value [s, b, kv_heads, d] -> [s, b, heads * d]; packed without b."""
        if packed_seq_params is not None:
            return packed_attention(query, key, value, packed_seq_params)
        query, key, value = (states.permute(1, 2, 0, 3) for states in (query, key, value))
        attended = functional.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        return attended.permute(2, 0, 1, 3).flatten(2)


def core_attention(backend: str) -> type[nn.Module]:
    """The core-attention module of the local spec: ``sdpa`` or ``te`` (through Megatron's wrapper, which takes the same
    arguments and the causal mask type of the spec).

    Raises:
        ValueError: Transformer Engine is asked for and cannot be imported.
    """
    if backend == "sdpa":
        return CausalAttention
    from megatron.core.extensions import transformer_engine

    if not transformer_engine.HAVE_TE:
        raise ValueError(
            "model.attention_backend=te, but transformer_engine cannot be imported (does `python -c 'import "
            "transformer_engine.pytorch'` work?): mend its installation, or use model.attention_backend=sdpa"
        )
    return transformer_engine.TEDotProductAttention
