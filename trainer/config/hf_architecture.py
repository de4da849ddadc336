"""The architecture of a Hugging Face model folder in the terms of the ``model`` section, or why it is none of ours.

``conf/model/hf.yaml`` takes its values from here, so that rules, plan and hash see the real numbers. Reads
``config.json`` alone, through transformers, which knows every version's spelling and defaults.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
from pathlib import Path
from typing import Any

from trainer.common.json_files import (
    COPY_AGAIN,
    FLAG,
    NUMBER,
    OBJECT,
    TEXT,
    Kind,
    field_faults,
    list_of,
    optional,
    read_json,
    whole,
)
from trainer.common.limits import Limits
from trainer.common.safetensors_folder import SafetensorsFolder, has_weights
from trainer.config.settings import setting_of

FAMILIES = ("llama", "qwen2", "qwen3", "mixtral", "qwen3_moe")
MIXTURES = ("mixtral", "qwen3_moe")
_ROPE_SCALING = {  # ours -> theirs
    "factor": "factor",
    "low_freq_factor": "low_freq_factor",
    "high_freq_factor": "high_freq_factor",
    "original_length": "original_max_position_embeddings",
}


_SIZES = {  # theirs -> ours
    "num_hidden_layers": "layers",
    "hidden_size": "hidden_size",
    **dict.fromkeys(("intermediate_size", "moe_intermediate_size"), "ffn_size"),
    "num_attention_heads": "heads",
    "num_key_value_heads": "kv_heads",
    "head_dim": "head_size",
    "vocab_size": "vocab_size",
    "max_position_embeddings": "max_length",
    **dict.fromkeys(("num_local_experts", "num_experts"), "num_experts"),
    "num_experts_per_tok": "num_experts_per_tok",
}
_DIGEST_DIGITS = 32
_OF_THE_WRITER = ("_name_or_path", "transformers_version")  # no part of a model
GENERATION_FILE = "generation_config.json"


def _size(setting: str) -> Kind:
    """Within the limits of our setting: transformers would make a list of 10^9 layers."""
    limits = next(rule for rule in setting_of(f"model.{setting}").said if isinstance(rule, Limits))
    return optional(whole(int(limits.smallest), limits.largest))


_FIELDS = {  # of config.json, whose absence transformers makes good
    **{theirs: _size(ours) for theirs, ours in _SIZES.items()},
    **dict.fromkeys(("rms_norm_eps", "initializer_range", "rope_theta"), optional(NUMBER)),
    **dict.fromkeys(("tie_word_embeddings", "attention_bias", "mlp_bias", "norm_topk_prob"), optional(FLAG)),
    **dict.fromkeys(("rope_scaling", "rope_parameters", "quantization_config"), optional(OBJECT)),
    **dict.fromkeys(("model_type", "hidden_act", "dtype", "torch_dtype"), optional(TEXT)),
    "layer_types": optional(list_of(TEXT)),
}


def architecture_of(folder: str) -> dict[str, Any]:
    """What the model in ``folder`` decides of a ``ModelConfig``: field -> value.

    A float16 checkpoint (or one that does not say) is a ``fp32`` model, which loses nothing. Embeddings are tied only
    if the weights have no vocabulary projection that differs from the embedding, whatever config.json says. The
    ``digest`` is that of config.json, of the weights' headers, sizes and samples, and of the tokens that
    generation_config.json ends a response with, not of where they lie.

    Raises:
        ValueError: there is no config.json, it is damaged, or it asks for something that a GPT of ours cannot compute;
            names it.
    """
    file = Path(folder, "config.json")
    if not os.path.isfile(file):  # which takes any text, as Path does not
        raise ValueError(
            f"model.path={folder} holds no config.json (relative paths start at the directory of the command): "
            "give a folder with a Hugging Face model (config.json, *.safetensors, tokenizer files)"
        )
    stamps = ((path.name, (stat := path.stat()).st_size, stat.st_mtime_ns) for path in sorted(Path(folder).iterdir()))
    return dict(_architecture_of(folder, tuple(stamps)))


@functools.lru_cache(maxsize=8)  # asked for once for each setting
def _architecture_of(folder: str, _: tuple[tuple[str, int, int], ...]) -> dict[str, Any]:
    file = Path(folder, "config.json")
    values = read_json(file, advice=COPY_AGAIN, fields=_FIELDS)
    family = values.get("model_type")
    if family not in FAMILIES:
        raise ValueError(f"model.path={folder} holds a model of type {family}: supported are {', '.join(FAMILIES)}")
    config = _read_by_transformers(file)
    bad = next(field_faults(config.rope_parameters, _rope_fields(config.rope_parameters), "rope_parameters."), None)
    if bad is not None:
        raise ValueError(f"{file} {bad}: {COPY_AGAIN}")
    unsupported = [text for is_given, text in _unsupported(config, family) if is_given]
    if unsupported:
        raise ValueError(
            f"model.path={folder} asks for what is not supported: {', '.join(unsupported)}. Supported are "
            f"{', '.join(FAMILIES)} with full attention, SiLU and default or llama3 rotary positions"
        )
    heads, rope, is_mixture = config.num_attention_heads, config.rope_parameters, family in MIXTURES
    return {
        "layers": config.num_hidden_layers,
        "hidden_size": config.hidden_size,
        "ffn_size": config.moe_intermediate_size if family == "qwen3_moe" else config.intermediate_size,
        "heads": heads,
        "kv_heads": config.num_key_value_heads,
        "head_size": getattr(config, "head_dim", None) or config.hidden_size // heads,  # Qwen2's has no such field
        "vocab_size": config.vocab_size,
        "max_length": config.max_position_embeddings,
        "rope_theta": float(rope["rope_theta"]),
        "rope_scaling": _rope_scaling(rope),
        "norm_eps": config.rms_norm_eps,
        "qkv_bias": family == "qwen2",
        "qk_norm": family in ("qwen3", "qwen3_moe"),
        "tie_embeddings": config.tie_word_embeddings and not _has_own_head(folder),
        "num_experts": _num_experts(config, family),
        "num_experts_per_tok": config.num_experts_per_tok if is_mixture else None,
        "norm_topk_prob": config.norm_topk_prob if family == "qwen3_moe" else True,
        "init_std": config.initializer_range,
        "digest": _digest(folder, values),
        "dtype": "bf16" if str(config.dtype).endswith("bfloat16") else "fp32",
    }


def _read_by_transformers(file: Path) -> Any:
    """The PreTrainedConfig in a config.json, which knows all defaults and older spellings."""
    from transformers import AutoConfig  # seconds that only runs with such a model pay

    try:
        return AutoConfig.from_pretrained(file.parent, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # transformers raises anything on values that it does not expect
        text = " ".join(str(error).split())
        raise ValueError(f"{file} cannot be read ({type(error).__name__}: {text}): {COPY_AGAIN}") from error


def _rope_fields(rope: dict[str, Any]) -> dict[str, Kind]:
    scaling = _ROPE_SCALING.values() if rope.get("rope_type") == "llama3" else ()
    return {"rope_theta": NUMBER, "rope_type": TEXT, **dict.fromkeys(scaling, NUMBER)}


def _digest(folder: str, values: dict[str, Any]) -> str:
    said = {key: value for key, value in values.items() if key not in _OF_THE_WRITER}
    weights = SafetensorsFolder(Path(folder)).digest() if has_weights(Path(folder)) else None
    file = Path(folder, GENERATION_FILE)
    ends = listed(read_json(file, advice=COPY_AGAIN).get("eos_token_id") if file.exists() else None)
    further = [end for end in ends if end not in listed(values.get("eos_token_id"))]
    known = [said, weights, *([further] if further else [])]
    return hashlib.sha256(json.dumps(known, sort_keys=True).encode()).hexdigest()[:_DIGEST_DIGITS]


def listed(given: Any) -> list[Any]:
    """An ``eos_token_id`` as files have it (one, a list of them, or null) as a list."""
    return given if isinstance(given, list) else [] if given is None else [given]


def _has_own_head(folder: str) -> bool:
    return has_weights(Path(folder)) and SafetensorsFolder(Path(folder)).has_own_head()


def _num_experts(config: Any, family: str) -> int | None:
    if family not in MIXTURES:
        return None
    return config.num_local_experts if family == "mixtral" else config.num_experts


def _rope_scaling(rope: dict[str, Any]) -> dict[str, float] | None:
    if rope["rope_type"] == "default":
        return None
    return {ours: rope[theirs] for ours, theirs in _ROPE_SCALING.items()}


def rope_parameters(*, theta: float, scaling: dict[str, float] | None) -> dict[str, Any]:
    """The inverse: what transformers calls ``rope_parameters``."""
    if scaling is None:
        return {"rope_type": "default", "rope_theta": theta}
    return {"rope_type": "llama3", "rope_theta": theta, **{_ROPE_SCALING[name]: scaling[name] for name in scaling}}


def check_family(model: Any) -> None:
    """Raise ValueError unless some Hugging Face family has the ``model``'s combination of parts."""
    if model.qkv_bias and model.qk_norm:
        raise ValueError(
            "model.qkv_bias=true together with model.qk_norm=true is no Hugging Face family: "
            "set model.qkv_bias=false (Qwen3) or model.qk_norm=false (Qwen2)"
        )
    if model.num_experts is not None and model.qkv_bias:
        raise ValueError(
            f"model.num_experts={model.num_experts} together with model.qkv_bias=true is no Hugging Face family: set "
            "model.qkv_bias=false (Mixtral, or Qwen3-MoE with model.qk_norm=true)"
        )
    if model.num_experts is not None and not (model.norm_topk_prob or model.qk_norm):
        raise ValueError(
            f"model.num_experts={model.num_experts} with model.norm_topk_prob=false and model.qk_norm=false is no "
            "Hugging Face family: set model.norm_topk_prob=true (Mixtral) or model.qk_norm=true (Qwen3-MoE)"
        )


def _unsupported(config: Any, family: str) -> list[tuple[bool, str]]:
    """(the config asks for it, its name), for all that the family can have and a GPT of ours cannot."""
    settings, rope = config.to_dict(), config.rope_parameters

    def given(key: str) -> bool:
        return bool(settings.get(key))

    sliding = given("use_sliding_window") or set(settings.get("layer_types") or ()) - {"full_attention"}
    sliding = sliding or (family == "mixtral" and given("sliding_window"))
    return [
        (config.hidden_act != "silu", f"hidden_act={config.hidden_act}"),
        (family != "qwen2" and given("attention_bias"), "attention_bias=true"),
        (given("mlp_bias"), "mlp_bias=true"),
        (bool(sliding), "sliding-window attention"),
        (rope["rope_type"] not in ("default", "llama3"), f"rope_type={rope['rope_type']}"),
        (rope.get("partial_rotary_factor", 1.0) != 1.0, "partial_rotary_factor"),
        (given("quantization_config"), "quantization_config"),
        (settings.get("decoder_sparse_step", 1) != 1, "decoder_sparse_step (layers without experts)"),
        (given("mlp_only_layers"), "mlp_only_layers"),
        (given("router_jitter_noise"), "router_jitter_noise"),
    ]
