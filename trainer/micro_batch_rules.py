"""Rules of ``algo.micro_batch_tokens``, which groups sequences by length; :mod:`trainer.rules` checks them."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from trainer.config import Config


def check(config: Config) -> None:
    """Raises ValueError: the first broken rule."""
    if config.algo.micro_batch_tokens is not None:
        check_equal_minibatches(config)
        check_a_sequence_fits(config)
        check_pipeline(config)


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
