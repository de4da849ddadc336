"""The architecture of a role: shapes that go together, checkpoints, experts, kernels, core attention."""

from __future__ import annotations

from dataclasses import asdict, fields
from importlib.util import find_spec

from trainer.common.multiples import divisors, round_up
from trainer.config.hf_architecture import architecture_of, check_family
from trainer.config.marks import Mark
from trainer.config.rules.limits import model_key
from trainer.config.schema import Config, ModelConfig
from trainer.config.settings import is_marked


def check_model_shapes(config: Config) -> None:
    for role, role_config in config.roles.items():
        model, name = role_config.model, f"roles.{role}.model"
        if model.head_size is not None and model.head_size % 2:
            raise ValueError(
                f"{name}.head_size={model.head_size} is odd, and rotary positions turn pairs: use "
                f"{model_key(config, role, 'head_size')}={model.head_size + 1}, or null for hidden_size / heads"
            )
        if model.head_size is None and model.hidden_size % (2 * model.heads):
            raise ValueError(
                f"{name}.hidden_size={model.hidden_size} is no multiple of 2 * {name}.heads = 2 * {model.heads} "
                f"(rotary positions turn pairs): use "
                f"{model_key(config, role, 'hidden_size')}={round_up(model.hidden_size, 2 * model.heads)}"
            )
        if model.heads % model.kv_heads:
            raise ValueError(
                f"{name}.heads={model.heads} is no multiple of {name}.kv_heads={model.kv_heads}: "
                f"use {model_key(config, role, 'kv_heads')}={' or '.join(map(str, divisors(model.heads)))}"
            )


def check_rope_scaling(config: Config) -> None:
    """Between its two factors Llama 3 blends, dividing by their difference."""
    for role, role_config in config.roles.items():
        scaling = role_config.model.rope_scaling
        if scaling is not None and scaling.low_freq_factor >= scaling.high_freq_factor:
            raise ValueError(
                f"roles.{role}.model.rope_scaling.low_freq_factor={scaling.low_freq_factor} is not below "
                f"high_freq_factor={scaling.high_freq_factor}: Llama 3 has 1 and 4"
            )


def check_checkpoints(config: Config) -> None:
    """A role that starts from a Hugging Face folder has the folder's architecture."""
    fixed = [field.name for field in fields(ModelConfig) if is_marked(f"model.{field.name}", Mark.ARCHITECTURE)]
    for role, role_config in config.roles.items():
        model, name = role_config.model, f"roles.{role}.model"
        if model.path is None:
            continue
        architecture, given = architecture_of(model.path), asdict(model)
        for field in fixed:
            if given[field] != architecture[field]:
                raise ValueError(
                    f"{name}.{field}={given[field]}, but the checkpoint in {name}.path={model.path} has {field}="
                    f"{architecture[field]}: leave it to the checkpoint (model=hf, or model@{name}=hf for one role), "
                    "or choose a model with random weights (model=tiny)"
                )
        if model.max_length > architecture["max_length"]:
            raise ValueError(
                f"{name}.max_length={model.max_length} is more than the {architecture['max_length']} tokens that the "
                f"checkpoint in {name}.path={model.path} was made for: use at most "
                f"{model_key(config, role, 'max_length')}={architecture['max_length']}"
            )


def check_experts(config: Config) -> None:
    """A mixture of experts has enough of them, and the rollout engine can compute the actor's."""
    for role, role_config in config.roles.items():
        model, name = role_config.model, f"roles.{role}.model"
        if model.num_experts is None:
            continue
        chosen = model.num_experts_per_tok
        if chosen is None or chosen > model.num_experts:
            raise ValueError(
                f"{name}.num_experts={model.num_experts} with {name}.num_experts_per_tok="
                f"{'null' if chosen is None else chosen}: give 1 to {model.num_experts} experts per token, "
                "model.num_experts_per_tok=2 for example"
            )
    check_family(config.roles["actor"].model)


def default_attention_backend(platform: str) -> str:
    """``te`` where Transformer Engine is installed and there are GPUs to run it, else ``sdpa``."""
    return "te" if platform == "cuda" and _has("transformer_engine") else "sdpa"


def default_kernels(platform: str) -> str:
    """``liger`` where Liger's kernels and Triton are installed and there are GPUs to run them, else ``te`` where
    Transformer Engine is, else ``torch``."""
    if platform != "cuda":
        return "torch"
    if _has("liger_kernel") and _has("triton"):
        return "liger"
    return "te" if _has("transformer_engine") else "torch"


def _has(module: str) -> bool:
    return find_spec(module) is not None


def check_kernels(config: Config) -> None:
    needs = {
        "liger": ("Liger's Triton kernels need", ("liger_kernel", "triton"), "pip install 'torpor[gpu]'"),
        "te": ("Transformer Engine needs", ("transformer_engine",), "pip install 'transformer-engine[pytorch]'"),
    }
    for role, role_config in config.roles.items():
        kernels = role_config.model.kernels
        if kernels not in needs:
            continue
        (who_needs, modules, command), setting = needs[kernels], f"roles.{role}.model.kernels={kernels}"
        if config.platform.name != "cuda":
            raise ValueError(
                f"{setting} with platform.name={config.platform.name}: {who_needs} a GPU. Use model.kernels=torch, or "
                "auto"
            )
        absent = [module for module in modules if not _has(module)]
        if absent:
            raise ValueError(
                f"{setting}, but {' and '.join(absent)} cannot be imported: {command}, or use model.kernels=torch, or "
                "auto"
            )


def check_attention_backend(config: Config) -> None:
    for role, role_config in config.roles.items():
        if role_config.model.attention_backend != "te":
            continue
        setting = f"roles.{role}.model.attention_backend=te"
        if config.platform.name != "cuda":
            raise ValueError(
                f"{setting} with platform.name={config.platform.name}: Transformer Engine needs a GPU. Use "
                "model.attention_backend=sdpa, or leave it out"
            )
        if not _has("transformer_engine"):
            raise ValueError(
                f"{setting}, but Transformer Engine is not installed: pip install 'transformer-engine[pytorch]', use "
                "model.attention_backend=sdpa, or leave it out"
            )
