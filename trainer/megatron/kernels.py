"""The small operations of a transformer layer (norm, SwiGLU, rotary positions) as torch, Liger or Transformer Engine
compute them.

``torch`` runs everywhere. The others need a GPU and do in one pass over memory what torch does in several: Liger's
Triton kernels (https://github.com/linkedin/Liger-Kernel, arXiv:2410.10989) with a rotary kernel of our own, or those of
Transformer Engine. All round where transformers rounds, so they differ in the last bits only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from megatron.core.models.common.embeddings.rope_utils import apply_rotary_pos_emb
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.mlp import MLP
from torch import Tensor, nn

from trainer.megatron.layers import RmsNorm
from trainer.megatron.packing import PackedSequences


@dataclass(frozen=True)
class LayerParts:
    """What a layer is built from.

    Attributes:
        norm: called as Megatron calls norms: ``norm(config=..., hidden_size=..., eps=...)``.
        self_attention: a subclass of Megatron's, or that itself.
        swiglu: config -> (gate and up projection [..., 2 f] -> [..., f]); None: Megatron's own lines of torch.
        settings: what Megatron's config must say beside.
    """

    norm: Callable[..., nn.Module]
    self_attention: type[SelfAttention]
    swiglu: Callable[[TransformerConfig], Callable[[Tensor], Tensor]] | None
    settings: dict[str, Any]

    def complete(self, modules: Iterable[nn.Module], config: TransformerConfig) -> None:
        """Give every MLP among ``modules``, experts included, its SwiGLU."""
        for module in modules:
            if self.swiglu is not None and isinstance(module, MLP):
                module.activation_func = self.swiglu(config)


def layer_parts(kernels: str) -> LayerParts:
    """The parts that ``model.kernels`` names: torch, liger or te."""
    if kernels == "liger":
        return LayerParts(LigerRmsNorm, FusedSelfAttention, lambda _: _liger_swiglu, _OWN_ACTIVATION)
    if kernels == "te":
        from megatron.core.extensions.transformer_engine import TEActivationOp, TENorm

        return LayerParts(TENorm, SelfAttention, TEActivationOp, {**_OWN_ACTIVATION, "apply_rope_fusion": True})
    return LayerParts(RmsNorm, PackableSelfAttention, None, {})


_OWN_ACTIVATION = {"use_te_activation_func": True}  # Megatron's name for: call activation_func on gate and up at once


class LigerRmsNorm(RmsNorm):
    """The same norm in one kernel. Its backward pass writes into the gradient it gets, which nobody else reads: what a
    norm gives goes into a projection."""

    def forward(self, hidden: Tensor) -> Tensor:
        from liger_kernel.ops.rms_norm import LigerRMSNormFunction

        return LigerRMSNormFunction.apply(hidden, self.weight, self.eps, 0.0, "llama", True, None)


def _liger_swiglu(gate_up: Tensor) -> Tensor:
    """[..., 2 f] -> [..., f]; the backward pass writes the gradient over ``gate_up``, which no one else keeps."""
    from liger_kernel.ops.swiglu import LigerFusedGateUpSiLUMulFunction

    return LigerFusedGateUpSiLUMulFunction.apply(gate_up.flatten(0, -2), True).unflatten(0, gate_up.shape[:-1])


class PackableSelfAttention(SelfAttention):
    """Megatron's self-attention, in which the rotary positions of packed sequences are one look-up and not one call for
    every sequence."""

    def forward(  # type: ignore[override]
        self, hidden_states: Tensor, *arguments: Any, packed_seq_params: PackedSequences | None = None, **options: Any
    ) -> tuple[Tensor, Tensor | None]:
        """hidden_states [s, b, hidden_size] (under sequence parallelism this rank's part of s) -> (the same shape, no
        bias)."""
        if packed_seq_params is None:
            return super().forward(hidden_states, *arguments, **options)
        frequencies = _first(options["rotary_pos_emb"])[packed_seq_params.positions]
        query, key, value = self.get_query_key_value_tensors(hidden_states)  # type: ignore[misc]
        query = apply_rotary_pos_emb(query, frequencies, config=self.config)  # type: ignore[arg-type]
        key = apply_rotary_pos_emb(key, frequencies, config=self.config)  # type: ignore[arg-type]
        return _attended(self, query, key, value, packed_seq_params)


def _first(rotary_pos_emb: Any) -> Tensor:
    """The angles of queries, which are those of keys."""
    return rotary_pos_emb[0] if isinstance(rotary_pos_emb, tuple) else rotary_pos_emb


def _attended(
    layer: SelfAttention, query: Tensor, key: Tensor, value: Tensor, packed: PackedSequences | None
) -> tuple[Tensor, Tensor | None]:
    """What a self-attention ends with, of turned queries and keys."""
    options: dict[str, Any] = {"attn_mask_type": layer.attn_mask_type}
    if packed is None:
        return layer.linear_proj(layer.core_attention(query, key, value, None, **options))  # type: ignore[operator]
    query, key, value = (states.squeeze(1) for states in (query, key, value))
    attended = layer.core_attention(query, key, value, None, packed_seq_params=packed, **options)  # type: ignore
    return layer.linear_proj(attended.reshape(len(attended), 1, -1))  # type: ignore[operator]


class FusedSelfAttention(SelfAttention):
    """Megatron's self-attention for training, in which one kernel makes contiguous query, key and value with rotary
    positions out of their joint projection."""

    def forward(  # type: ignore[override]
        self,
        hidden_states: Tensor,
        *_: Any,
        rotary_pos_emb: Any,
        packed_seq_params: PackedSequences | None = None,
        **__: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """hidden_states [s, b, hidden_size] (under sequence parallelism this rank's part of s) -> (the same shape, no
        bias)."""
        from trainer.megatron.rotary_triton import split_and_turn, turn

        frequencies = _first(rotary_pos_emb)
        positions = None if packed_seq_params is None else packed_seq_params.positions
        if self.config.qk_layernorm:
            query, key, value = self.get_query_key_value_tensors(hidden_states)  # type: ignore[misc]
            query = turn(query, frequencies, positions=positions)  # type: ignore[arg-type]
            key = turn(key, frequencies, positions=positions)  # type: ignore[arg-type]
        else:
            joint, _ = self.linear_qkv(hidden_states)  # type: ignore[operator]
            query, key, value = split_and_turn(
                joint,
                frequencies,
                groups=self.num_query_groups_per_partition,
                width=self.hidden_size_per_attention_head,
                positions=positions,
            )
        return _attended(self, query, key, value, packed_seq_params)
