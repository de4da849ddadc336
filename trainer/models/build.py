"""Actor and critic as megatron-core GPTModels under the patched DistributedDataParallel.

A model is a list of chunks (one, without virtual pipeline).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import asdict
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from torch.nn import functional
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from trainer.config import DdpConfig, ModelConfig, ParallelConfig
from trainer.hf_architecture import rope_parameters
from trainer.models import moe
from trainer.models.layers import RmsNorm, ValueHead, core_attention

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


def transformer_config(model: ModelConfig, *, parallel: ParallelConfig) -> TransformerConfig:
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
        init_method_std=model.init_std,
        bf16=dtype == torch.bfloat16,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        tensor_model_parallel_size=parallel.tp,
        pipeline_model_parallel_size=parallel.pp,
        calculate_per_token_loss=True,
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        apply_rope_fusion=False,
        persist_layer_norm=False,
        **moe.transformer_settings(model, expert_parallel=parallel.expert),
    )


def _block_spec(model: ModelConfig) -> TransformerBlockSubmodules:
    layer = get_gpt_layer_local_spec(num_experts=model.num_experts, qk_layernorm=model.qk_norm, normalization="RMSNorm")
    parts: Any = layer.submodules
    parts.input_layernorm = RmsNorm
    parts.pre_mlp_layernorm = RmsNorm
    attention = parts.self_attention.submodules
    attention.core_attention = core_attention(model.attention_backend)
    if model.qk_norm:
        attention.q_layernorm = attention.k_layernorm = RmsNorm
    assert isinstance(layer, ModuleSpec)
    return TransformerBlockSubmodules(layer_specs=[layer] * model.layers, layer_norm=RmsNorm)  # type: ignore[arg-type]


def build_gpt(
    model: ModelConfig, *, vocab_size: int, parallel: ParallelConfig, seed: int, value_head: bool
) -> GPTModel:
    """A randomly initialised GPTModel on the current device; ``value_head`` replaces the vocabulary projection.

    Args:
        seed: of Megatron's RNG tracker; the same seed gives the same weights.
    """
    model_parallel_cuda_manual_seed(seed)
    config = transformer_config(model, parallel=parallel)
    gpt = GPTModel(
        config=config,
        transformer_layer_spec=_block_spec(model),  # type: ignore[arg-type]
        vocab_size=vocab_size,
        max_sequence_length=model.max_length,
        parallel_output=False,
        share_embeddings_and_output_weights=model.tie_embeddings and not value_head,
        position_embedding_type="rope",
        rotary_base=model.rope_theta,  # type: ignore[arg-type]
    )
    if model.rope_scaling is not None:  # Megatron's own rope_scaling knows only one of its four numbers
        gpt.rotary_pos_emb.inv_freq = _scaled_inverse_frequencies(model)
    moe.finish(gpt, model, seed=seed)
    if value_head:
        gpt.output_layer = ValueHead(config)  # type: ignore[assignment]
    return gpt.to(torch.cuda.current_device())


def _scaled_inverse_frequencies(model: ModelConfig) -> torch.Tensor:
    """Llama 3's rotary frequencies, as transformers computes them: [head_dim / 2] in fp32."""
    rope = rope_parameters(theta=model.rope_theta, scaling=asdict(model.rope_scaling))  # type: ignore[arg-type]
    config = LlamaConfig(head_dim=model.head_dim, rope_parameters=rope)  # type: ignore[arg-type]
    frequencies, attention_factor = ROPE_INIT_FUNCTIONS["llama3"](config, device=torch.device("cpu"))
    assert attention_factor == 1.0
    return frequencies


def wrap_ddp(
    gpt: GPTModel,
    ddp: DdpConfig,
    *,
    disable_param_backup: bool,
    owner: AbstractContextManager[None],
) -> DistributedDataParallel:
    """Wrap ``gpt`` in Megatron's DDP, its buffers built under ``owner`` (see ``patches.buffer_owner``)."""
    settings = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        use_distributed_optimizer=ddp.use_distributed_optimizer,
        overlap_grad_reduce=ddp.overlap_grad_reduce,
        overlap_param_gather=ddp.overlap_param_gather,
        nccl_ub=ddp.nccl_ub,
    )
    flags = {
        "disable_grad_buffers_cpu_backup": ddp.disable_grad_buffers_cpu_backup,
        "disable_param_buffers_cpu_backup": disable_param_backup,
    }
    with owner:
        chunk = DistributedDataParallel(gpt.config, settings, gpt, **flags)  # type: ignore[call-arg]
    gpt.config.finalize_model_grads_func = finalize_model_grads
    if ddp.overlap_grad_reduce:
        gpt.config.no_sync_func = chunk.no_sync
    return chunk


def named_tensors(chunks: list[Any]) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor a model reads in a forward pass: parameters, buffers, and tensors kept as plain attributes.

    Megatron keeps rotary tables as plain attributes, which ``state_dict`` does not see. Names carry the chunk's
    number, so that those of two chunks never collide; experts have their number in the whole model. Tied tensors come
    once.
    """
    seen: set[int] = set()
    first_expert = 0
    for index, chunk in enumerate(chunks):
        for module_name, module in chunk.module.named_modules():
            if isinstance(module, MoELayer):
                first_expert = module.local_expert_indices[0]
            module_name = moe.global_name(module_name, first_expert=first_expert)
            for attributes in (module._parameters, module._buffers, vars(module)):
                for name, tensor in attributes.items():
                    if isinstance(tensor, torch.Tensor) and id(tensor) not in seen:
                        seen.add(id(tensor))
                        yield f"chunk{index}.{module_name}.{name}".replace("..", "."), tensor


def move_rest(chunks: list[Any], region: AbstractContextManager[None]) -> None:
    """Move every tensor of :func:`named_tensors` that lies in no DDP buffer into ``region``, in place.

    Done after the buffers took their parameters, so that the region holds live bytes only.
    """
    buffers = [buffer for chunk in chunks for buffer in chunk.buffers + chunk.expert_parallel_buffers]
    in_buffers = {buffer.param_data.untyped_storage().data_ptr() for buffer in buffers if buffer.param_data is not None}
    with region:
        for _, tensor in named_tensors(chunks):
            if tensor.untyped_storage().data_ptr() not in in_buffers:
                tensor.data = tensor.detach().clone()


def drop_caches() -> None:
    """Forget Megatron's cached rotary tables: they would lie outside every region and outlive a sleep."""
    RotaryEmbedding.forward.cache_clear()  # type: ignore[attr-defined]
