"""Responses of rollout=native from one model that ranks share in different ways; used by test_native_engine."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import distributed

from tests.helpers.roles import fresh_saver, make_role, small_config
from trainer.config.pieces import make_task
from trainer.megatron import platform
from trainer.megatron.groups import data_parallel_rank, data_parallel_size
from trainer.memory.saver import make_saver
from trainer.rollout.engines import make_engine
from trainer.tasks.tokenizer import load_tokenizer

MODEL = (
    *("model.layers=4", "model.hidden_size=64", "model.ffn_size=96", "model.heads=4", "model.kv_heads=2"),
    *("model.dtype=fp32", "model.init_std=0.2", "rollout.max_prompt_tokens=40", "rollout.max_new_tokens=20"),
)
MOE = ("model.num_experts=4", "model.num_experts_per_tok=2", "model.qk_norm=true")
# Of unequal lengths, some of them twice: 12 in all, which two data-parallel ranks share.
PROMPTS = [[10 + i, *range(20, 20 + 7 * (i % 5))] for i in range(9)] + [[5, 6]] * 2 + [[5, 6, 7]]


def run_layouts(layouts: dict[str, tuple[str, ...]]) -> dict[str, Any]:
    """Layout -> (tokens, response mask, log-probs) of all responses in order, greedy and drawn, after a sleep."""
    ranks = f"launch.nproc={os.environ['WORLD_SIZE']}"
    config = small_config(*MODEL, ranks)
    platform.set_up(config)
    platform.set_up_process_groups(config)
    return {name: _responses((*MODEL, ranks, *layout)) for name, layout in layouts.items()}


def _responses(overrides: tuple[str, ...]) -> dict[bool, list[torch.Tensor]]:
    fresh_saver()
    config = small_config(*overrides)
    platform.set_up_parallel_groups(config.parallel)
    tokenizer = load_tokenizer(None, task=make_task(config), vocab_size=config.tokenizer.vocab_size)
    actor = make_role("actor", *overrides, vocab_size=len(tokenizer))
    saver = make_saver(config)
    engine = make_engine(config, actor=actor, tokenizer=tokenizer, saver=saver, observer=lambda event: None)
    actor.sleep()
    share = len(PROMPTS) // data_parallel_size()
    first = data_parallel_rank() * share
    numbers = range(first, first + share)
    found = {}
    for greedy in (True, False):
        with engine.awake():
            own = engine.generate(PROMPTS[first : first + share], seed=3, numbers=numbers, greedy=greedy)
        rows = [(own.tokens[i][own.response_mask[i]], own.log_probs[i][own.response_mask[i]]) for i in range(share)]
        everyones: list[Any] = [None] * distributed.get_world_size()
        distributed.all_gather_object(everyones, (first, rows))
        found[greedy] = [row for _, rows in sorted(dict(everyones).items()) for row in rows]
    return found
