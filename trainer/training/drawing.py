"""A step's responses and what they are paid: drawn once or, with dynamic sampling, until groups have a spread.

Dynamic sampling (DAPO, arXiv:2503.14476 section 3.2): a group of responses to one question that are all paid alike
teaches nothing, so it gives its place to a group of another question that has a spread. Every round asks as many new
questions as a step has; ``algo.dynamic_sampling_rounds`` limits the rounds after the first. Places for which none was
found keep their first group.

Simplified: a rank fills its own places; all ranks draw as many rounds as the one that needs most.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from trainer.algo.groups import group_statistics
from trainer.algo.shaping import overlong_penalty
from trainer.common.seeds import seed_for
from trainer.config.schema import Config
from trainer.data.batch import RolloutBatch, joined
from trainer.data.prompts import Prompts
from trainer.data.rewards import Payer
from trainer.megatron.groups import max_over_ranks
from trainer.rollout.base import RolloutEngine
from trainer.training.episodes import Tally, play


@dataclass(frozen=True)
class Drawn:
    """``batch``: the step's responses on this rank; ``rounds``: how often the engine drew for them; ``drawn_groups``
    and ``flat_groups``: how many groups it drew on this rank, and how many of these had no spread; ``tally``: what
    happened in all the episodes that it drew on this rank."""

    batch: RolloutBatch
    rounds: int
    drawn_groups: int
    flat_groups: int
    tally: Tally


def draw(config: Config, prompts: Prompts, engine: RolloutEngine, *, step: int, is_judged: bool) -> Drawn:
    """The responses of a PPO step, with scores unless ``is_judged`` (a role pays them later: then they are 0).

    The engine is asleep before and after. Collective over the ranks.
    """
    size = config.algo.responses_per_prompt
    with engine.awake():
        batch, tally = _round(config, prompts, engine, step=step, number=0, is_judged=is_judged)
        groups = len(batch) // size
        is_flat = _flat_groups(batch, size)
        drawn, flat, rounds = groups, int(is_flat.sum()), 1
        while rounds <= config.algo.dynamic_sampling_rounds and max_over_ranks(int(is_flat.sum())):
            more, of_round = _round(config, prompts, engine, step=step, number=rounds, is_judged=is_judged)
            more_flat = _flat_groups(more, size)
            batch, is_flat = _replaced(batch, more, is_flat=is_flat, is_useful=~more_flat, size=size, pad=prompts.pad)
            drawn, flat, rounds, tally = drawn + groups, flat + int(more_flat.sum()), rounds + 1, tally + of_round
    overlong = config.algo.overlong
    if overlong.penalty:
        tokens, limit = batch.response_mask.sum(1), config.rollout.max_new_tokens
        batch = batch.paid(overlong.penalty * overlong_penalty(tokens, limit=limit, buffer=overlong.buffer))
    return Drawn(batch, rounds, drawn, flat, tally)


def _round(
    config: Config, prompts: Prompts, engine: RolloutEngine, *, step: int, number: int, is_judged: bool
) -> tuple[RolloutBatch, Tally]:
    episodes = play(
        config,
        prompts,
        engine,
        prompts.for_step(step, round_number=number),
        seed=seed_for(config.seed, "rollout" if number == 0 else f"rollout/{number}", step=step),
        payer=Payer.JUDGE if is_judged else Payer.REWARD,
        numbers=prompts.response_numbers(),
    )
    return episodes.batch(weights_step=step - 1), episodes.tally


def _flat_groups(batch: RolloutBatch, size: int) -> Tensor:
    """[groups] bool: whose responses (empty ones left out) are all paid alike."""
    found = group_statistics(batch.scores, valid=batch.response_mask.any(1), group_size=size)
    return found.deviation[::size] == 0


def _replaced(
    batch: RolloutBatch, more: RolloutBatch, *, is_flat: Tensor, is_useful: Tensor, size: int, pad: int
) -> tuple[RolloutBatch, Tensor]:
    """``batch`` with useful groups of ``more`` in the places of flat ones, and which are flat now."""
    places, found = is_flat.nonzero().squeeze(1), is_useful.nonzero().squeeze(1)
    count = min(len(places), len(found))
    source = torch.arange(len(is_flat), device=is_flat.device)
    source[places[:count]] = found[:count] + len(is_flat)  # groups of ``more`` come after those of ``batch``
    rows = (source[:, None] * size + torch.arange(size, device=source.device)).flatten()
    left = is_flat.clone()
    left[places[:count]] = False
    return joined([batch, more], pad=pad).select(rows), left
