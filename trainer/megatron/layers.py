"""Modules that replace parts of megatron-core's local layer spec, and the critic's value head.

The local spec's own parts need Apex or Transformer Engine for sequence parallelism and build the whole attention
matrix. These two compute with plain torch: RMSNorm as Hugging Face's Llama and Qwen do it, attention through
``scaled_dot_product_attention``. Where Transformer Engine is there, its attention can stand in for the latter.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional


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

    Batches are padded on the right, so causality alone keeps real tokens from seeing padding.
    """

    def __init__(self, config: Any, **_: Any) -> None:
        super().__init__()

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> Tensor:
        """query [s, b, heads, d], key and value [s, b, kv_heads, d] -> [s, b, heads * d]."""
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


class ValueHead(nn.Module):
    """One fp32 value per token; stands where a GPTModel has its output layer.

    A bf16 value has 8 significant bits, too few for returns of the size of one; so both the head's weights and its
    arithmetic are fp32, and the critic has a second, small DDP buffer of that dtype.

    Under sequence parallelism every tensor-parallel rank computes the values of the whole sequence, so that the head's
    gradient is the same on all of them and is not summed.
    """

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.sequence_parallel = config.sequence_parallel
        self.weight = nn.Parameter(
            torch.zeros(1, config.hidden_size, dtype=torch.float32, device=torch.cuda.current_device())
        )

    def forward(self, hidden: Tensor, weight: Tensor | None = None, **_: Any) -> tuple[Tensor, None]:
        """hidden [s, b, hidden_size], under sequence parallelism this rank's part of s -> (values [s, b, 1] in fp32, no
        bias)."""
        if self.sequence_parallel:
            from megatron.core.tensor_parallel import gather_from_sequence_parallel_region

            hidden = gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=False)
        return functional.linear(hidden.float(), self.weight), None
