"""What the actor answers to held-out questions."""

from __future__ import annotations

from functools import partial

from trainer.common.seeds import seed_for
from trainer.config.schema import Config
from trainer.data.prompts import Prompts
from trainer.data.rewards import Payer
from trainer.measure.accuracy import heldout_metrics, sampled_metrics
from trainer.megatron.groups import data_parallel_rank
from trainer.rollout.base import RolloutEngine
from trainer.training.episodes import play


def evaluate(config: Config, prompts: Prompts, engine: RolloutEngine, *, at_step: int) -> dict[str, float | None]:
    """Held-out accuracy for the record: what the environment pays for greedy responses to held-out questions and, with
    ``algo.evaluation_samples``, for so many that are drawn as in a rollout. The engine is asleep before and after.
    Collective over the ranks."""
    examples, samples = prompts.heldout(config.algo.heldout_prompts), config.algo.evaluation_samples
    played = partial(play, config, prompts, engine, payer=Payer.ENVIRONMENT)
    drawn: list[float] = []
    with engine.awake():
        greedy = played(examples, seed=0, greedy=True).rewards
        if samples:
            seed = seed_for(config.seed, "evaluation", step=at_step, rank=data_parallel_rank())
            drawn = played([example for example in examples for _ in range(samples)], seed=seed).rewards
    found = heldout_metrics(examples, greedy)
    return found | sampled_metrics(examples, drawn, samples=samples) if samples else found
