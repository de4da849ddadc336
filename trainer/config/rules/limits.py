"""Settings judged by themselves: one word out of a few, or a number in an interval.

``model`` and ``optimizer`` settings are judged at the top level and in every role. Rules that join several settings
are in :mod:`trainer.config.rules`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

from trainer.config.schema import Config

# Dotted name -> allowed words.
CHOICES = {
    "model.dtype": ("bf16", "fp32"),
    "model.kernels": ("auto", "torch", "liger", "te"),
    "model.attention_backend": ("sdpa", "te"),
    "optimizer.lr_schedule": ("constant", "linear", "cosine", "wsd"),
    "optimizer.lr_wsd_decay_style": ("exponential", "linear", "cosine", "minus_sqrt"),
    "data.too_long": ("error", "drop", "truncate"),
    "rollout.engine": ("native", "hf"),
    "algo.loss_aggregation": ("token_mean", "sequence_mean", "fixed_length"),
    "algo.old_log_probs": ("auto", "forward", "training"),
    "algo.kl.placement": ("reward", "loss"),
    "algo.kl.estimator": ("k1", "k2", "k3"),
    "platform.name": ("cpu", "cuda"),
    "logger.kind": ("none", "tensorboard", "wandb"),
    "memory.tags": ("full", "sharded"),
    "memory.optim_format": ("fp32", "bf16"),
    "memory.cpu_backup_backend": ("pinned", "mmap"),
}

# Dotted name -> (smallest, largest or None). A value of None is left to the setting's meaning.
RANGES: dict[str, tuple[float, float | None]] = {
    "model.layers": (1, None),
    "model.hidden_size": (2, None),
    "model.ffn_size": (1, None),
    "model.heads": (1, None),
    "model.kv_heads": (1, None),
    "model.head_size": (2, None),
    "model.vocab_size": (1, None),
    "model.max_length": (2, None),
    "model.rope_theta": (1, None),
    "model.norm_eps": (0, None),
    "model.num_experts": (2, None),
    "model.num_experts_per_tok": (1, None),
    "model.router_aux_loss_coef": (0, None),
    "model.init_std": (0, None),
    "optimizer.lr": (0, None),
    "optimizer.min_lr_ratio": (0, 1),
    "optimizer.lr_warmup_steps": (0, None),
    "optimizer.lr_wsd_decay_steps": (1, None),
    "optimizer.beta1": (0, 0.999999),
    "optimizer.beta2": (0, 0.999999),
    "optimizer.eps": (0, None),
    "optimizer.weight_decay": (0, None),
    "optimizer.clip_grad": (0, None),
    "parallel.tp": (1, None),
    "parallel.pp": (1, None),
    "parallel.vpp": (1, None),
    "parallel.cp": (1, None),
    "parallel.expert": (1, None),
    "rollout.temperature": (1e-3, None),
    "rollout.top_p": (1e-3, 1),
    "rollout.top_k": (0, None),
    "rollout.min_p": (0, 1),
    "rollout.kv_cache_gib": (0, None),
    "rollout.max_prompt_tokens": (1, None),
    "rollout.max_new_tokens": (1, None),
    "algo.num_steps": (0, None),
    "algo.warmup_steps": (0, None),
    "algo.warmup_lr": (0, None),
    "algo.warmup_batch_size": (1, None),
    "algo.prompts_per_step": (1, None),
    "algo.responses_per_prompt": (1, None),
    "algo.epochs": (1, None),
    "algo.minibatches": (1, None),
    "algo.micro_batch_size": (1, None),
    "algo.micro_batch_tokens": (1, None),
    "algo.clip_low": (0, 1),
    "algo.clip_high": (0, None),
    "algo.value_clip": (0, None),
    "algo.log_ratio_clamp": (0, None),
    "algo.entropy_coef": (0, 1e6),  # with more, float32 gradients overflow
    "algo.loss_length": (1, None),
    "algo.critic_warmup_steps": (0, None),
    "algo.heldout_prompts": (1, None),
    "algo.evaluate_every": (1, None),
    "algo.kl.coef": (0, 1e6),
    "algo.kl.clamp": (0, None),
    "algo.kl.horizon": (1, None),
    "checkpoint.every_steps": (1, None),
    "checkpoint.keep_last": (1, None),
    "platform.peak_tflops": (1e-6, None),
    "memory.piece_mib": (2**-10, None),
    "launch.nproc": (1, None),
    "launch.nnodes": (1, None),
    "launch.node_rank": (0, None),
    "launch.max_restarts": (0, None),
    "launch.threads_per_worker": (1, None),
    "launch.host_memory_gib": (0, None),
    "launch.gpu_memory_gib": (0, None),
}


def check_finite(config: Config) -> None:
    """YAML and the command line have ``inf`` and ``nan``, and no comparison with a limit refuses both."""
    for name, value in _numbers(dataclasses.asdict(config)):
        if not math.isfinite(value):
            raise ValueError(f"{name}={value}: must be a finite number")


def _numbers(value: Any, name: str = "") -> Iterator[tuple[str, float]]:
    """(dotted name, value) of every fractional number."""
    if isinstance(value, float):
        yield name, value
    parts = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, part in parts:
        yield from _numbers(part, f"{name}.{key}" if name else str(key))


def check_choices(config: Config) -> None:
    for dotted, allowed in CHOICES.items():
        for name, value in _settings(config, dotted):
            if value not in allowed:
                raise ValueError(f"{name}={value}: must be one of {', '.join(allowed)}")


def check_ranges(config: Config) -> None:
    for dotted, (smallest, largest) in RANGES.items():
        for name, value in _settings(config, dotted):
            if value is not None and not (smallest <= value and (largest is None or value <= largest)):
                limits = f"at least {smallest}" if largest is None else f"between {smallest} and {largest}"
                raise ValueError(f"{name}={value}: must be {limits}")


def _settings(config: Config, dotted: str) -> Iterator[tuple[str, Any]]:
    """The setting wherever it occurs: (dotted name, value)."""
    *path, field = dotted.split(".")
    prefixes = [""]
    if path[0] in ("model", "optimizer"):
        prefixes += [f"roles.{role}." for role in config.roles]
    for prefix in prefixes:
        section: Any = config.roles[prefix.split(".")[1]] if prefix else config
        for name in path:
            section = getattr(section, name)
        if section is not None and field in vars(section):  # the learning rate has no top-level setting
            yield f"{prefix}{dotted}", getattr(section, field)


def model_key(config: Config, role: str, field: str) -> str:
    """The override that changes the setting: the top-level one as long as the role agrees with it."""
    shared = getattr(config.model, field) == getattr(config.roles[role].model, field)
    return f"model.{field}" if shared else f"roles.{role}.model.{field}"


def next_multiple(value: int, divisor: int) -> int:
    """The smallest multiple of ``divisor`` that is not below ``value``."""
    return -(-value // divisor) * divisor
