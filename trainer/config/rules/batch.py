"""How the sequences of a step are divided, and how long they may be."""

from __future__ import annotations

import math

from trainer.common.multiples import divisors, round_up
from trainer.config.rules.limits import model_key
from trainer.config.schema import AUTO, Config


def check_batch_sizes(config: Config) -> None:
    algo, dp = config.algo, config.data_parallel_size
    if algo.prompts_per_step % dp:
        raise ValueError(
            f"algo.prompts_per_step={algo.prompts_per_step} is no multiple of the data-parallel size {dp} "
            f"(launch.nnodes * launch.nproc / parallel.tp / parallel.pp / parallel.cp): use "
            f"algo.prompts_per_step={round_up(algo.prompts_per_step, dp)}"
        )
    samples = algo.prompts_per_step * algo.responses_per_prompt
    unit = dp * algo.minibatches * algo.micro_batch_size
    if samples % unit and algo.micro_batch_tokens is None:
        prompts = round_up(algo.prompts_per_step, math.lcm(dp, unit // math.gcd(unit, algo.responses_per_prompt)))
        per_minibatch, rest = divmod(samples, dp * algo.minibatches)
        sizes = divisors(per_minibatch) if per_minibatch and not rest else ()
        fits = [size for size in sizes if size <= algo.micro_batch_size]
        smaller = f" or algo.micro_batch_size={fits[-1]}" if fits else ""
        raise ValueError(
            f"algo.prompts_per_step * algo.responses_per_prompt = {algo.prompts_per_step} * "
            f"{algo.responses_per_prompt} = {samples} is no multiple of data-parallel size * algo.minibatches * "
            f"algo.micro_batch_size = {dp} * {algo.minibatches} * {algo.micro_batch_size} = {unit}: use "
            f"algo.prompts_per_step={prompts}{smaller}"
        )
    if algo.warmup_batch_size % dp:
        raise ValueError(
            f"algo.warmup_batch_size={algo.warmup_batch_size} is no multiple of the data-parallel size {dp}: use "
            f"algo.warmup_batch_size={round_up(algo.warmup_batch_size, dp)}"
        )


def check_lengths(config: Config) -> None:
    length = config.rollout.max_prompt_tokens + config.rollout.max_new_tokens
    for role, role_config in config.roles.items():
        if length > role_config.model.max_length:
            raise ValueError(
                f"rollout.max_prompt_tokens + rollout.max_new_tokens = {config.rollout.max_prompt_tokens} + "
                f"{config.rollout.max_new_tokens} = {length} exceeds roles.{role}.model.max_length="
                f"{role_config.model.max_length}: use {model_key(config, role, 'max_length')}={length} "
                "or shorter sequences"
            )


def check_equal_minibatches(config: Config) -> None:
    """Ranks and minibatches have equally many sequences; how many make a micro-batch is not fixed."""
    if config.algo.micro_batch_tokens is None:
        return
    algo, dp = config.algo, config.data_parallel_size
    samples, unit = algo.prompts_per_step * algo.responses_per_prompt, dp * algo.minibatches
    if samples % unit:
        prompts = math.lcm(dp, unit // math.gcd(unit, algo.responses_per_prompt))
        raise ValueError(
            f"algo.prompts_per_step * algo.responses_per_prompt = {algo.prompts_per_step} * "
            f"{algo.responses_per_prompt} = {samples} is no multiple of data-parallel size * algo.minibatches = {dp} * "
            f"{algo.minibatches} = {unit}: use algo.prompts_per_step={round_up(algo.prompts_per_step, prompts)}"
        )


def check_automatic_tokens(config: Config) -> None:
    if config.algo.micro_batch_tokens == AUTO and config.launch.gpu_memory_gib is None:
        raise ValueError(
            f"algo.micro_batch_tokens={AUTO} with launch.gpu_memory_gib=null: say how much memory each GPU has, "
            "launch.gpu_memory_gib=80 for example, or give a number of tokens"
        )


def check_a_sequence_fits(config: Config) -> None:
    if config.algo.micro_batch_tokens in (None, AUTO):
        return
    length = config.rollout.max_prompt_tokens + config.rollout.max_new_tokens
    if config.algo.micro_batch_tokens < length:
        raise ValueError(
            f"algo.micro_batch_tokens={config.algo.micro_batch_tokens} is less than one sequence may have, "
            f"rollout.max_prompt_tokens + rollout.max_new_tokens = {length}: use algo.micro_batch_tokens={length} or "
            "more, or null for algo.micro_batch_size"
        )


def check_packing(config: Config) -> None:
    if config.training.packing and config.algo.micro_batch_tokens is None:
        longest = config.rollout.max_prompt_tokens + config.rollout.max_new_tokens
        raise ValueError(
            "training.packing=true with algo.micro_batch_tokens=null: packed micro-batches are filled up to a number "
            f"of tokens, not of sequences. Use algo.micro_batch_tokens={longest * config.algo.micro_batch_size} or "
            f"another number from {longest}, or training.packing=false"
        )


def check_tokens_in_pipeline(config: Config) -> None:
    if config.algo.micro_batch_tokens is None:
        return
    if config.parallel.pp > 1:
        raise ValueError(
            f"algo.micro_batch_tokens={config.algo.micro_batch_tokens} with parallel.pp={config.parallel.pp}: stages "
            "exchange activations of one shape, and micro-batches by length have many. Use "
            "algo.micro_batch_tokens=null with algo.micro_batch_size, or parallel.pp=1"
        )
