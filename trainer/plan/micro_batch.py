"""The largest micro-batch that fits: what ``algo.micro_batch_tokens=auto`` becomes. Pure, the same on every rank."""

from __future__ import annotations

import dataclasses

from trainer.config.schema import AUTO, Config
from trainer.plan import activations
from trainer.plan.footprint import footprint
from trainer.plan.holdings import EngineBytes
from trainer.plan.reserve import MARGIN, lasting_bytes

GIB = 2**30


def with_micro_batch_tokens(config: Config, *, vocab_size: int, engine: EngineBytes) -> Config:
    """``config`` with a number in the place of ``algo.micro_batch_tokens=auto``: the most tokens with which training of
    every role fits ``launch.gpu_memory_gib``, and no more than a minibatch of a rank has.

    Raises:
        ValueError: not even one sequence of the longest fits.
    """
    if config.algo.micro_batch_tokens != AUTO:
        return config

    alone = dataclasses.replace(config, offload=dataclasses.replace(config.offload, auto=False))  # others may sleep

    def needed_bytes(tokens: int) -> float:
        moments = footprint(with_tokens(alone, tokens), vocab_size=vocab_size, engine=engine).moments
        return max(m.device_bytes + MARGIN * m.activation_bytes for m in moments if m.name.startswith("train "))

    assert config.launch.gpu_memory_gib is not None, "the rules ask for it"
    room = config.launch.gpu_memory_gib * GIB - lasting_bytes(config)
    least, most = activations.longest_sequence(config), _minibatch_tokens(config)
    if needed_bytes(least) > room:
        more = "" if config.training.recompute == "full" else ", training.recompute=full"
        raise ValueError(
            f"algo.micro_batch_tokens=auto: training on one sequence of rollout.max_prompt_tokens + "
            f"rollout.max_new_tokens = {least} tokens needs {needed_bytes(least) / GIB:.2f} GiB of GPU memory, and "
            f"launch.gpu_memory_gib={config.launch.gpu_memory_gib:g} leaves {room / GIB:.2f}. Use shorter "
            f"sequences{more} or more ranks (parallel.tp, parallel.cp)"
        )
    while least < most:
        middle = (least + most + 1) // 2
        least, most = (middle, most) if needed_bytes(middle) <= room else (least, middle - 1)
    return with_tokens(config, least)


def with_tokens(config: Config, tokens: int) -> Config:
    return dataclasses.replace(config, algo=dataclasses.replace(config.algo, micro_batch_tokens=tokens))


def _minibatch_tokens(config: Config) -> int:
    """Of a rank, the most that one optimizer step can have."""
    algo, ranks = config.algo, config.data_parallel_size
    rows = algo.prompts_per_step * algo.responses_per_prompt // (ranks * algo.minibatches)
    if algo.warmup_steps:
        rows = max(rows, algo.warmup_batch_size // ranks)
    return rows * activations.longest_sequence(config)
