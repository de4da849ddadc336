"""A pass over packed tokens through the actor's own chunks, with the parameters as they lie in Megatron's buffers.

What a layer computes is what its Megatron modules compute in training, without what autograd, dropout and sequence
parallelism need there. Tensor-parallel ranks hold their heads' keys and values and sum after each branch; pipeline
stages hand the hidden states on. t tokens, g key-value heads on this rank, m query heads for each, d elements per head.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.models.gpt import GPTModel
from torch import Tensor, distributed
from torch.nn import functional

from trainer.config.schema import ModelConfig
from trainer.megatron.groups import pipeline_group, pipeline_rank, tensor_parallel_group
from trainer.megatron.heads import output_weight
from trainer.rollout.native.attention import Attention, Prompts, Rows
from trainer.rollout.native.experts import Experts
from trainer.rollout.native.pieces import Pieces


@dataclass(frozen=True)
class Pass:
    """One pass: over prompts, or over one token of each row.

    Attributes:
        cos, sin: [t, 1, 1, d], see :meth:`Decoder.rotary_table`.
        places: [t] int64, where keys and values go in the cache, pages laid one after the other.
        attends_to: the prompts that the tokens form, or the rows that they continue.
        has_fixed_shapes: no shape may depend on what experts are chosen.
    """

    cos: Tensor
    sin: Tensor
    places: Tensor
    attends_to: Prompts | Rows
    has_fixed_shapes: bool


class Decoder:
    """The actor as a function from tokens to logits, on every rank that holds a part of it.

    Args:
        gpts: what :func:`trainer.megatron.build.build_chunks` built; their parameters are read in each pass.
        vocab_size: entries of the tokenizer; logits beyond them are cut off.
    """

    def __init__(
        self, gpts: Sequence[GPTModel], model: ModelConfig, *, attention: Attention, pieces: Pieces, vocab_size: int
    ) -> None:
        self._gpts = gpts
        self._pieces, self._eps = pieces, model.norm_eps
        self._vocab_size, self._hidden_size = vocab_size, model.hidden_size
        self._layers = [[_Layer(layer, model, attention, pieces) for layer in gpt.decoder.layers] for gpt in self._gpts]
        self.dtype = self._gpts[0].config.params_dtype
        self.layer_count = sum(len(layers) for layers in self._layers)
        self.is_first = self._gpts[0].pre_process
        self.is_last = self._gpts[-1].post_process

    def rotary_table(self, length: int) -> Tensor:
        """[2, length, 1, 1, d]: cosines and sines of the positions, rounded to the model's dtype as Megatron does it;
        the sines of the first half of a head are negated, see :func:`trainer.rollout.native.pieces.place`."""
        frequencies = self._gpts[0].rotary_pos_emb.inv_freq
        angles = torch.outer(torch.arange(length, device=frequencies.device, dtype=torch.float32), frequencies)
        table = torch.stack([torch.cat([angles.cos()] * 2, dim=-1), torch.cat([-angles.sin(), angles.sin()], dim=-1)])
        return table.to(self.dtype)[:, :, None, None]

    def hidden(self, tokens: Tensor, step: Pass, cache: Tensor) -> Tensor:
        """tokens [t] -> hidden states [t, hidden_size], after the final norm on the last pipeline stage and of no use
        on others.

        Args:
            cache: [layers of this rank, pages, page tokens, g, 2, d], which receives the tokens' keys and values.
        """
        layer_caches = iter(cache)
        states = tokens
        for gpt, layers in zip(self._gpts, self._layers, strict=True):
            states = self._embed(gpt, tokens) if gpt.pre_process else self._received(len(tokens))
            branch: Tensor | None = None
            for layer in layers:
                states, branch = layer(states, branch, step, next(layer_caches))
            assert branch is not None
            if gpt.post_process:
                final = gpt.decoder.final_layernorm
                assert final is not None
                _, states = self._pieces.add_and_norm(states, branch, final.weight, self._eps)
            else:
                _send(states + branch)
        return states

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [n, hidden_size], on the last pipeline stage -> [n, vocab_size], on each of its tensor-parallel ranks
        those of the whole vocabulary."""
        group = tensor_parallel_group()
        logits = functional.linear(hidden, output_weight(self._gpts[-1]))
        if group.size() > 1:
            parts = [torch.empty_like(logits) for _ in range(group.size())]
            distributed.all_gather(parts, logits, group=group)
            logits = torch.cat(parts, dim=-1)
        return logits[:, : self._vocab_size]

    def _embed(self, gpt: GPTModel, tokens: Tensor) -> Tensor:
        weight, group = gpt.embedding.word_embeddings.weight, tensor_parallel_group()
        if group.size() == 1:
            return functional.embedding(tokens, weight)
        own = tokens - group.rank() * len(weight)
        is_own = (own >= 0) & (own < len(weight))
        return _summed(functional.embedding(own.where(is_own, 0), weight) * is_own[:, None])

    def _received(self, tokens: int) -> Tensor:
        """The hidden states that the previous pipeline stage sends."""
        group = pipeline_group()
        states = torch.empty(tokens, self._hidden_size, dtype=self.dtype, device=torch.cuda.current_device())
        distributed.recv(states, group=group, group_src=(pipeline_rank() - 1) % group.size())
        return states


class _Layer:
    """One transformer layer of Megatron's."""

    def __init__(self, layer: Any, model: ModelConfig, attention: Attention, pieces: Pieces) -> None:
        self._layer, self._own, self._core, self._pieces = layer, layer.self_attention, attention, pieces
        self._eps = model.norm_eps
        self._head_dim, self._has_qk_norm = model.head_dim, model.qk_norm
        self._width = model.heads // model.kv_heads + 2  # query heads of a group, key, value
        self._experts = Experts(layer.mlp, dtype=layer.config.params_dtype) if model.num_experts is not None else None

    def __call__(self, states: Tensor, branch: Tensor | None, step: Pass, cache: Tensor) -> tuple[Tensor, Tensor]:
        """The residual stream and the branch that is yet to be added to it -> the same after this layer."""
        before_attention, before_mlp = self._layer.input_layernorm, self._layer.pre_mlp_layernorm
        if branch is None:
            normed = self._pieces.norm(states, before_attention.weight, self._eps)
        else:
            states, normed = self._pieces.add_and_norm(states, branch, before_attention.weight, self._eps)
        branch = self._attend(normed, step, cache)
        states, normed = self._pieces.add_and_norm(states, branch, before_mlp.weight, self._eps)
        if self._experts is not None:
            return states, self._experts(normed, has_fixed_shapes=step.has_fixed_shapes)
        mlp = self._layer.mlp
        inner = self._pieces.gated(functional.linear(normed, mlp.linear_fc1.weight))
        return states, _summed(functional.linear(inner, mlp.linear_fc2.weight))

    def _attend(self, normed: Tensor, step: Pass, cache: Tensor) -> Tensor:
        own = self._own
        qkv = functional.linear(normed, own.linear_qkv.weight, own.linear_qkv.bias)
        qkv = qkv.view(len(qkv), -1, self._width, self._head_dim)
        if self._has_qk_norm:
            for heads, norm in ((qkv[:, :, :-2], own.q_layernorm), (qkv[:, :, -2], own.k_layernorm)):
                heads.copy_(self._pieces.norm(heads, norm.weight, self._eps))
        query, key, value = self._pieces.place(qkv, step.cos, step.sin, cache.flatten(0, 1), step.places)
        if isinstance(step.attends_to, Prompts):
            attended = self._core.of_prompts(query, key, value, step.attends_to)
        else:
            attended = self._core.of_rows(query, cache, step.attends_to)
        return _summed(functional.linear(attended, own.linear_proj.weight))


def _summed(partial: Tensor) -> Tensor:
    """Over the tensor-parallel ranks."""
    group = tensor_parallel_group()
    if group.size() > 1:
        distributed.all_reduce(partial, group=group)
    return partial


def _send(states: Tensor) -> None:
    """To the next pipeline stage; after the last one comes the first, with its next chunk."""
    group = pipeline_group()
    distributed.send(states.contiguous(), group=group, group_dst=(pipeline_rank() + 1) % group.size())
