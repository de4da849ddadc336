"""Rules of what makes training fast: core attention, micro-batches by length; :mod:`trainer.rules` checks them."""

from __future__ import annotations

import math
from importlib.util import find_spec
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from trainer.config import Config


def check(config: Config) -> None:
    """Raises ValueError: the first broken rule."""
    check_attention_backend(config)
    if config.algo.micro_batch_tokens is not None:
        check_equal_minibatches(config)
        check_a_sequence_fits(config)
        check_pipeline(config)


def default_attention_backend(platform: str) -> str:
    """``te`` where Transformer Engine is installed and there are GPUs to run it, else ``sdpa``."""
    return "te" if platform == "cuda" and _has_transformer_engine() else "sdpa"


def _has_transformer_engine() -> bool:
    return find_spec("transformer_engine") is not None


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
        if not _has_transformer_engine():
            raise ValueError(
                f"{setting}, but Transformer Engine is not installed: pip install 'transformer-engine[pytorch]', use "
                "model.attention_backend=sdpa, or leave it out"
            )


def check_equal_minibatches(config: Config) -> None:
    """Ranks and minibatches have equally many sequences; how many make a micro-batch is not fixed."""
    algo, dp = config.algo, config.data_parallel_size
    samples, unit = algo.prompts_per_step * algo.responses_per_prompt, dp * algo.minibatches
    if samples % unit:
        prompts = math.lcm(dp, unit // math.gcd(unit, algo.responses_per_prompt))
        raise ValueError(
            f"algo.prompts_per_step * algo.responses_per_prompt = {algo.prompts_per_step} * "
            f"{algo.responses_per_prompt} = {samples} is no multiple of data-parallel size * algo.minibatches = {dp} * "
            f"{algo.minibatches} = {unit}: use algo.prompts_per_step={-(-algo.prompts_per_step // prompts) * prompts}"
        )


def check_a_sequence_fits(config: Config) -> None:
    length = config.rollout.max_prompt_tokens + config.rollout.max_new_tokens
    if config.algo.micro_batch_tokens < length:  # type: ignore[operator]
        raise ValueError(
            f"algo.micro_batch_tokens={config.algo.micro_batch_tokens} is less than one sequence may have, "
            f"rollout.max_prompt_tokens + rollout.max_new_tokens = {length}: use algo.micro_batch_tokens={length} or "
            "more, or null for algo.micro_batch_size"
        )


def check_pipeline(config: Config) -> None:
    if config.parallel.pp > 1:
        raise ValueError(
            f"algo.micro_batch_tokens={config.algo.micro_batch_tokens} with parallel.pp={config.parallel.pp}: stages "
            "exchange activations of one shape, and micro-batches by length have many. Use "
            "algo.micro_batch_tokens=null with algo.micro_batch_size, or parallel.pp=1"
        )
