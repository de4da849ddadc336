"""Actor and critic as megatron-core GPTModels under the patched DistributedDataParallel.

A model is a list of chunks (one, without virtual pipeline). Weights are drawn per tensor of the whole model, so the
same seed gives the same model under every parallel layout.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict
from types import SimpleNamespace
from typing import Any, cast

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from torch.nn import functional

from patches.ddp_buffer_backup import RegionFor
from trainer.common.multiples import round_up
from trainer.common.seeds import seed_for
from trainer.config.hf_architecture import rope_parameters
from trainer.config.schema import DdpConfig, ModelConfig, ParallelConfig
from trainer.megatron import moe
from trainer.megatron.groups import tensor_parallel_group
from trainer.megatron.heads import ValueHead, VocabularyHead
from trainer.megatron.kernels import layer_parts
from trainer.megatron.layers import core_attention
from trainer.megatron.sharding import Chunk, ddp_buffers, declare_shardings, named_tensors, sharding_of
from trainer.models.dtypes import DTYPES


def transformer_config(model: ModelConfig, *, parallel: ParallelConfig, recompute: str = "none") -> TransformerConfig:
    """Megatron's config of ``model``. Losses are sums over tokens; Megatron divides by the global token count."""
    dtype = DTYPES[model.dtype]
    return TransformerConfig(
        num_layers=model.layers,
        hidden_size=model.hidden_size,
        ffn_hidden_size=model.ffn_size,
        num_attention_heads=model.heads,
        num_query_groups=model.kv_heads,
        kv_channels=model.head_dim,
        normalization="RMSNorm",
        layernorm_epsilon=model.norm_eps,
        qk_layernorm=model.qk_norm,
        gated_linear_unit=True,
        activation_func=functional.silu,
        add_bias_linear=False,
        add_qkv_bias=model.qkv_bias,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        init_method=_leave,  # see _draw_weights
        output_layer_init_method=_leave,
        embedding_init_method=_leave,
        bf16=dtype == torch.bfloat16,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        tensor_model_parallel_size=parallel.tp,
        sequence_parallel=parallel.tp > 1,
        context_parallel_size=parallel.cp,
        pipeline_model_parallel_size=parallel.pp,
        virtual_pipeline_model_parallel_size=parallel.vpp if parallel.vpp > 1 else None,
        # Interleaved chunks with batched sends and receives give wrong gradients, without an error.
        overlap_p2p_comm=parallel.vpp > 1,
        batch_p2p_comm=parallel.vpp == 1,
        calculate_per_token_loss=True,
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        persist_layer_norm=False,
        **_recompute_settings(model, recompute),
        **layer_parts(model.kernels).settings,
        **moe.transformer_settings(model, expert_parallel=parallel.expert),
    )


def _recompute_settings(model: ModelConfig, recompute: str) -> dict[str, Any]:
    """Of Megatron's config, for ``training.recompute``. Its own choice for ``selective``, the core attention, saves
    nothing where that keeps no scores; most of what a layer keeps is its MLP's."""
    if recompute == "full":
        return {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    if recompute == "selective":
        wide = "mlp" if model.num_experts is None else "moe"
        return {"recompute_granularity": "selective", "recompute_modules": [wide]}
    return {}


def _leave(tensor: torch.Tensor) -> None:
    """Megatron's initialisation draws on each rank for itself; ours comes later."""


def _block_spec(model: ModelConfig, *, layers: int) -> TransformerBlockSubmodules:
    layer = get_gpt_layer_local_spec(num_experts=model.num_experts, qk_layernorm=model.qk_norm, normalization="RMSNorm")
    parts: Any = layer.submodules
    kernels = layer_parts(model.kernels)
    parts.input_layernorm = parts.pre_mlp_layernorm = kernels.norm
    parts.self_attention.module = kernels.self_attention
    attention = parts.self_attention.submodules
    attention.core_attention = core_attention(model.attention_backend)
    if model.qk_norm:
        attention.q_layernorm = attention.k_layernorm = kernels.norm
    assert isinstance(layer, ModuleSpec)
    return TransformerBlockSubmodules(layer_specs=[layer] * layers, layer_norm=kernels.norm)  # type: ignore[arg-type]


def build_chunks(
    model: ModelConfig,
    *,
    vocab_size: int,
    parallel: ParallelConfig,
    seed: int,
    value_head: bool,
    recompute: str = "none",
) -> list[GPTModel]:
    """This rank's part of a randomly initialised GPT on the current device, a GPTModel per virtual pipeline stage.

    Args:
        seed: the same seed gives the same whole model, however it is shared among ranks.
        value_head: replaces the vocabulary projection. Without it, a model gives hidden states, see
            :mod:`trainer.megatron.heads`.
        recompute: see :class:`trainer.config.schema.TrainingConfig`.
    """
    model_parallel_cuda_manual_seed(seed)
    config = transformer_config(model, parallel=parallel, recompute=recompute)
    stages = range(parallel.vpp) if parallel.vpp > 1 else [None]
    chunks = [_build_chunk(model, config, vocab_size, stage=stage, value_head=value_head) for stage in stages]
    for chunk in chunks:
        chunk.rotary_pos_emb.inv_freq = chunks[0].rotary_pos_emb.inv_freq  # one table for all
        declare_shardings(chunk, vocab_size=vocab_size)
        _draw_weights(chunk, model, seed=seed)
    return chunks


def build_gpt(
    model: ModelConfig, *, vocab_size: int, parallel: ParallelConfig, seed: int, value_head: bool
) -> GPTModel:
    """The only chunk of :func:`build_chunks`, where there is no virtual pipeline."""
    (gpt,) = build_chunks(model, vocab_size=vocab_size, parallel=parallel, seed=seed, value_head=value_head)
    return gpt


def _build_chunk(
    model: ModelConfig, config: TransformerConfig, vocab_size: int, *, stage: int | None, value_head: bool
) -> GPTModel:
    is_last = parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=stage)
    tensor_parallel = tensor_parallel_group().size()
    gpt = GPTModel(
        config=config,
        transformer_layer_spec=_block_spec(model, layers=get_num_layers_to_build(config, vp_stage=stage)),  # type: ignore[arg-type]
        vocab_size=round_up(vocab_size, tensor_parallel),
        max_sequence_length=model.max_length,
        pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=stage),
        post_process=is_last,
        parallel_output=True,
        share_embeddings_and_output_weights=model.tie_embeddings and not value_head,
        position_embedding_type="rope",
        rotary_base=model.rope_theta,  # type: ignore[arg-type]
        vp_stage=stage,
    )
    if model.rope_scaling is not None:  # Megatron's own rope_scaling knows only one of its four numbers
        gpt.rotary_pos_emb.inv_freq = _scaled_inverse_frequencies(model)
    moe.complete_layers(gpt, model)
    layer_parts(model.kernels).complete(gpt.modules(), config)
    if is_last:
        weight = gpt.output_layer.weight
        gpt.output_layer = (  # type: ignore[assignment]
            ValueHead(config) if value_head else VocabularyHead(config, weight, fused=model.kernels == "liger")
        )
    return gpt.to(torch.cuda.current_device())


@torch.no_grad()
def _draw_weights(gpt: GPTModel, model: ModelConfig, *, seed: int) -> None:
    """Draw every matrix from a normal distribution, as Megatron does it: the two projections that end a layer's
    branches with ``init_std / sqrt(2 * layers)``, all others with ``init_std``. Norms, biases and the value head, which
    start as ones and zeros, stay. Each whole matrix has a seed of its own; a rank keeps its part of it.
    """
    group = tensor_parallel_group()
    for name, tensor in named_tensors([cast(Chunk, SimpleNamespace(module=gpt))]):
        if not isinstance(tensor, torch.nn.Parameter) or tensor.dim() < 2 or tensor is _value_weight(gpt):
            continue
        ends_branch = name.endswith((".linear_proj.weight", ".linear_fc2.weight"))
        std = model.init_std / math.sqrt(2 * model.layers) if ends_branch else model.init_std
        sharding = sharding_of(tensor)
        whole = torch.empty(sharding.whole_shape(tensor.shape), dtype=tensor.dtype, device=tensor.device)
        whole.normal_(0.0, std, generator=torch.Generator(tensor.device).manual_seed(seed_for(seed, name)))
        tensor.copy_(sharding.part(whole, rank=group.rank(), ranks=group.size()))


def _value_weight(gpt: GPTModel) -> torch.Tensor | None:
    head = getattr(gpt, "output_layer", None)
    return head.weight if isinstance(head, ValueHead) else None


def _scaled_inverse_frequencies(model: ModelConfig) -> torch.Tensor:
    """Llama 3's rotary frequencies, as transformers computes them: [head_dim / 2] in fp32."""
    from transformers import LlamaConfig  # half a second that only runs with such a model pay
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    rope = rope_parameters(theta=model.rope_theta, scaling=asdict(model.rope_scaling))  # type: ignore[arg-type]
    config = LlamaConfig(head_dim=model.head_dim, rope_parameters=rope)  # type: ignore[arg-type]
    frequencies, attention_factor = ROPE_INIT_FUNCTIONS["llama3"](config, device=torch.device("cpu"))
    assert attention_factor == 1.0
    return frequencies


def wrap_ddp(
    gpt: GPTModel,
    ddp: DdpConfig,
    *,
    disable_grad_backup: bool,
    disable_param_backup: bool,
    region_for: RegionFor | None,
) -> Chunk:
    """Wrap ``gpt`` in Megatron's DDP. ``region_for``: kind of a buffer and whether it has a backup -> its region (see
    ``patches.ddp_buffer_backup``)."""
    settings = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        use_distributed_optimizer=ddp.use_distributed_optimizer,
        overlap_grad_reduce=ddp.overlap_grad_reduce,
        overlap_param_gather=ddp.overlap_param_gather,
        nccl_ub=ddp.nccl_ub,
    )
    chunk = DistributedDataParallel(
        gpt.config,
        settings,
        gpt,
        disable_grad_buffers_cpu_backup=disable_grad_backup,  # type: ignore[call-arg]
        disable_param_buffers_cpu_backup=disable_param_backup,  # type: ignore[call-arg]
        region_for=region_for,  # type: ignore[call-arg]
    )
    gpt.config.finalize_model_grads_func = finalize_model_grads
    if ddp.overlap_grad_reduce:
        earlier = gpt.config.no_sync_func or []
        # Megatron wants a list exactly where there are several chunks.
        gpt.config.no_sync_func = chunk.no_sync if gpt.vp_stage is None else [*earlier, chunk.no_sync]  # type: ignore
    return cast(Chunk, chunk)


class _FrozenChunk(torch.nn.Module):
    """A part of a model that is never trained, in the place of Megatron's DDP: no gradients and no buffers."""

    def __init__(self, gpt: GPTModel) -> None:
        super().__init__()
        self.module = gpt.requires_grad_(False)
        self.buffers = self.expert_parallel_buffers = ()  # type: ignore[assignment]  (as DDP, which hides the method)

    def forward(self, *arguments: Any, **options: Any) -> Any:
        return self.module(*arguments, **options)


def frozen(gpt: GPTModel) -> Chunk:
    """``gpt`` as one that is never trained."""
    return cast(Chunk, _FrozenChunk(gpt))


def move_rest(chunks: Sequence[Chunk], region: AbstractContextManager[None]) -> None:
    """Move every tensor of :func:`named_tensors` that lies in no DDP buffer into ``region``, in place.

    Done after the buffers took their parameters, so that the region holds live bytes only.
    """
    param_data = [buffer.param_data for buffer in ddp_buffers(chunks) if buffer.param_data is not None]
    in_buffers = {data.untyped_storage().data_ptr() for data in param_data}
    with region:
        for _, tensor in named_tensors(chunks):
            if tensor.untyped_storage().data_ptr() not in in_buffers:
                tensor.data = tensor.detach().clone()


def drop_caches() -> None:
    """Forget Megatron's cached rotary tables and the buffers into which tensor-parallel layers gather sequences: they
    would lie outside every region and outlive a sleep."""
    RotaryEmbedding.forward.cache_clear()  # type: ignore[attr-defined]
    parallel_state.get_global_memory_buffer().buffer.clear()
