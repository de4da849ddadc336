"""Names, layouts and config of the same model in megatron-core and in transformers, both ways.

A GPT of :func:`trainer.megatron.build.build_gpt` is a Llama (arXiv:2302.13971), with ``model.qkv_bias`` a Qwen2
(arXiv:2407.10671), with ``model.qk_norm`` a Qwen3 (arXiv:2505.09388). With ``model.num_experts`` it is a Mixtral
(arXiv:2401.04088) or, with ``model.qk_norm`` too, a Qwen3-MoE. Megatron fuses three projections into ``linear_qkv``,
grouped by key-value head, and two into ``linear_fc1``; Hugging Face files keep each apart. (transformers fuses the
experts of a layer when it loads a file: :func:`views_by_file_name`.)

Both ways deal in tensors of the whole model; :mod:`trainer.megatron.sharding` cuts and joins them. Simplified: language
models, and sequence classifiers with one label, only. A value head has Megatron's name of the vocabulary projection;
on the way to Hugging Face leave it out.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig, MixtralConfig, PreTrainedConfig, Qwen2Config, Qwen3Config, Qwen3MoeConfig

from trainer.config.hf_architecture import check_family, rope_parameters
from trainer.config.schema import ModelConfig
from trainer.models.dtypes import DTYPES
from trainer.models.weight_checks import check_weight

_OUTPUT, _SCORE = "output_layer.weight", "score.weight"
_ROTARY_TABLE = "rotary_pos_emb.inv_freq"  # recomputed from rope_theta on either side


def hf_config(
    model: ModelConfig,
    *,
    vocab_size: int,
    bos_token_id: int | None,
    eos_token_id: int | list[int] | None,
    pad_token_id: int | None,
) -> PreTrainedConfig:
    """The transformers config of ``model``: LlamaConfig, Qwen2Config, Qwen3Config, MixtralConfig or Qwen3MoeConfig.

    Raises:
        ValueError: no family has ``model``'s combination of QKV bias, QK norms and experts.
    """
    check_family(model)
    own: dict[str, Any] = {"head_dim": model.head_dim}  # of some families only
    if model.num_experts is None:
        family: Any = Qwen2Config if model.qkv_bias else Qwen3Config if model.qk_norm else LlamaConfig
    elif model.qk_norm:
        family = Qwen3MoeConfig
        own |= {"num_experts": model.num_experts, "num_experts_per_tok": model.num_experts_per_tok}
        own |= {"moe_intermediate_size": model.ffn_size, "norm_topk_prob": model.norm_topk_prob}
    else:
        family = MixtralConfig
        own |= {"num_local_experts": model.num_experts, "num_experts_per_tok": model.num_experts_per_tok}
    scaling = None if model.rope_scaling is None else asdict(model.rope_scaling)
    return family(
        architectures=[family.__name__.replace("Config", "ForCausalLM")],
        vocab_size=vocab_size,
        hidden_size=model.hidden_size,
        intermediate_size=model.ffn_size,
        num_hidden_layers=model.layers,
        num_attention_heads=model.heads,
        num_key_value_heads=model.kv_heads,
        max_position_embeddings=model.max_length,
        initializer_range=model.init_std,
        rms_norm_eps=model.norm_eps,
        tie_word_embeddings=model.tie_embeddings,
        rope_parameters=rope_parameters(theta=model.rope_theta, scaling=scaling),
        bos_token_id=bos_token_id,
        eos_token_id=eos_token_id,
        pad_token_id=pad_token_id,
        dtype=DTYPES[model.dtype],
        **own,
    )


def to_hf(named: Iterable[tuple[str, Tensor]], *, model: ModelConfig) -> Iterator[tuple[str, Tensor]]:
    """(name, tensor) pairs of :func:`trainer.megatron.sharding.whole_tensors` -> those of the transformers state dict.

    One tensor at a time; split tensors are new, all others the very ones given. Tied output weights come once, as
    the embedding.

    Raises:
        ValueError: a name that ``model`` does not have.
    """
    counterparts = _counterparts(model)
    for name, tensor in named:
        if name.endswith(_ROTARY_TABLE):
            continue
        if name not in counterparts:
            raise ValueError(f"{name} has no counterpart in the Hugging Face model of this architecture")
        hf_names = counterparts[name]
        yield from zip(hf_names, _split(tensor, parts=len(hf_names), model=model), strict=True)


def from_hf(hf_state: Mapping[str, Tensor], *, model: ModelConfig, value_head: bool = False) -> Mapping[str, Tensor]:
    """A transformers state dict as Megatron's: the inverse of :func:`to_hf`.

    Each tensor is read, judged (:mod:`trainer.models.weight_checks`) and fused when it is asked for, so with a
    ``hf_state`` that reads from disk the weights are never in memory as a whole.

    Args:
        value_head: leave out the vocabulary projection; a ``score`` of one number per token, as sequence classifiers
            have it, is the head.

    Raises:
        ValueError: the state dict lacks tensors that ``model`` has, or has others (a bias without
            ``model.qkv_bias``, say); names them. Raised when it is asked for: a tensor of another shape, or that
            holds what is no weight.
    """
    counterparts = _counterparts(model)
    if value_head:
        counterparts.pop(_OUTPUT, None)
        if has_value_head(hf_state):
            counterparts[_OUTPUT] = (_SCORE,)
    wanted = {hf_name for hf_names in counterparts.values() for hf_name in hf_names}
    given = {name for name in hf_state if not name.endswith("rotary_emb.inv_freq")}
    if model.tie_embeddings or value_head:
        given.discard("lm_head.weight")
    check_names(given, wanted=wanted)
    return _FromHf(hf_state, counterparts, model)


def has_value_head(hf_state: Mapping[str, Tensor]) -> bool:
    """Whether a state dict has the head of a sequence classifier."""
    return _SCORE in hf_state


@dataclass(frozen=True)
class _FromHf(Mapping[str, Tensor]):
    """What :func:`from_hf` returns."""

    hf_state: Mapping[str, Tensor]
    counterparts: dict[str, tuple[str, ...]]
    model: ModelConfig

    def __getitem__(self, name: str) -> Tensor:
        parts = []
        for hf_name in self.counterparts[name]:
            parts.append(self.hf_state[hf_name])
            check_weight(hf_name, parts[-1], model=self.model)
        return _join(parts, model=self.model)

    def __contains__(self, name: object) -> bool:
        return name in self.counterparts  # Mapping's own reads the tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self.counterparts)

    def __len__(self) -> int:
        return len(self.counterparts)


def check_names(given: Iterable[str], *, wanted: Iterable[str]) -> None:
    """Raise ValueError, naming the tensors, unless the two sets of names are equal."""
    given, wanted = set(given), set(wanted)
    for problem, names in (("lack", wanted - given), ("have, unlike the model,", given - wanted)):
        if names:
            raise ValueError(
                f"the weights {problem} {', '.join(sorted(names))}: architecture (model.layers, model.qkv_bias, "
                "model.qk_norm, model.tie_embeddings, model.num_experts) and weights must agree"
            )


def file_names(model: ModelConfig) -> set[str]:
    """The name of every parameter in Hugging Face files, tied ones once."""
    return {hf_name for hf_names in _counterparts(model).values() for hf_name in hf_names}


def _counterparts(model: ModelConfig) -> dict[str, tuple[str, ...]]:
    """Megatron's name of every parameter -> its name or, of a fused one, its parts' names in transformers."""
    qkv = [f"self_attn.{kind}_proj" for kind in "qkv"]
    layer = {
        "input_layernorm.weight": ["input_layernorm.weight"],
        "self_attention.linear_qkv.weight": [f"{name}.weight" for name in qkv],
        "self_attention.linear_proj.weight": ["self_attn.o_proj.weight"],
        "pre_mlp_layernorm.weight": ["post_attention_layernorm.weight"],
        **_mlp_counterparts(model),
    }
    if model.qkv_bias:
        layer["self_attention.linear_qkv.bias"] = [f"{name}.bias" for name in qkv]
    if model.qk_norm:
        layer["self_attention.q_layernorm.weight"] = ["self_attn.q_norm.weight"]
        layer["self_attention.k_layernorm.weight"] = ["self_attn.k_norm.weight"]
    names: dict[str, tuple[str, ...]] = {"embedding.word_embeddings.weight": ("model.embed_tokens.weight",)}
    for index in range(model.layers):
        for name, hf_names in layer.items():
            names[f"decoder.layers.{index}.{name}"] = tuple(f"model.layers.{index}.{part}" for part in hf_names)
    names["decoder.final_layernorm.weight"] = ("model.norm.weight",)
    if not model.tie_embeddings:
        names[_OUTPUT] = ("lm_head.weight",)
    return names


def _mlp_counterparts(model: ModelConfig) -> dict[str, list[str]]:
    """Those of one layer's MLP or experts."""
    if model.num_experts is None:
        return _projections("mlp", "mlp", ("gate_proj", "up_proj", "down_proj"))
    names = ("gate_proj", "up_proj", "down_proj") if model.qk_norm else ("w1", "w3", "w2")
    block = "mlp" if model.qk_norm else "block_sparse_moe"
    found = {"mlp.router.weight": [f"{block}.gate.weight"]}
    for expert in range(model.num_experts):
        found |= _projections(f"mlp.experts.{expert}", f"{block}.experts.{expert}", names)
    return found


def _projections(ours: str, theirs: str, names: tuple[str, str, str]) -> dict[str, list[str]]:
    gate, up, down = (f"{theirs}.{name}.weight" for name in names)
    return {f"{ours}.linear_fc1.weight": [gate, up], f"{ours}.linear_fc2.weight": [down]}


def views_by_file_name(parameters: Mapping[str, Tensor], *, model: ModelConfig) -> dict[str, Tensor]:
    """The ``parameters`` of a transformers model under the names that its files have.

    A layer's experts are two parameters there, ``mlp.experts.gate_up_proj`` [experts, 2 * ffn_size, hidden_size] and
    ``mlp.experts.down_proj`` [experts, hidden_size, ffn_size]: files have three matrices per expert, here views.
    """
    if model.num_experts is None:
        return dict(parameters)
    counterparts, views = _mlp_counterparts(model), {}
    for name, parameter in parameters.items():
        prefix, _, rest = name.partition("mlp.")
        if rest == "gate.weight":
            views[prefix + counterparts["mlp.router.weight"][0]] = parameter
        elif rest.startswith("experts."):
            ours, parts = ("linear_fc1", 2) if rest == "experts.gate_up_proj" else ("linear_fc2", 1)
            for expert, fused in enumerate(parameter):
                hf_names = counterparts[f"mlp.experts.{expert}.{ours}.weight"]
                views |= {prefix + hf_name: view for hf_name, view in zip(hf_names, fused.chunk(parts), strict=True)}
        else:
            views[name] = parameter
    return views


def _split(fused: Tensor, *, parts: int, model: ModelConfig) -> Iterable[Tensor]:
    """Three parts are query, key, value: fused [kv_heads * (q_per_kv + 2) * head_dim, ...], that is per key-value
    head its queries, its key, its value. Two parts are gate and up: fused [2 * ffn_size, ...]."""
    if parts != 3:
        return fused.chunk(parts)
    q_per_kv, head_dim = model.heads // model.kv_heads, model.head_dim
    groups = fused.view(model.kv_heads, q_per_kv + 2, head_dim, *fused.shape[1:])
    return (part.reshape(-1, *fused.shape[1:]) for part in groups.split([q_per_kv, 1, 1], dim=1))


def _join(parts: list[Tensor], *, model: ModelConfig) -> Tensor:
    """The inverse of :func:`_split`."""
    if len(parts) != 3:
        return torch.cat(parts) if len(parts) > 1 else parts[0]
    rest = parts[0].shape[1:]
    groups = [part.reshape(model.kv_heads, -1, model.head_dim, *rest) for part in parts]
    return torch.cat(groups, dim=1).reshape(-1, *rest)
