"""What the actor answers to held-out questions."""

from __future__ import annotations

from trainer.common.seeds import seed_for
from trainer.config.schema import Config
from trainer.data.prompts import Prompts
from trainer.measure.accuracy import heldout_metrics, sampled_metrics
from trainer.megatron.groups import data_parallel_rank
from trainer.rollout.base import RolloutEngine


def evaluate(config: Config, prompts: Prompts, engine: RolloutEngine, *, at_step: int) -> dict[str, float | None]:
    """Held-out accuracy for the record: the task's verdicts on greedy responses to held-out questions and, with
    ``algo.evaluation_samples``, on so many that are drawn as in a rollout. The engine is asleep before and after.
    Collective over the ranks."""
    examples = prompts.heldout(config.algo.heldout_prompts)
    encoded, samples = prompts.encode(examples), config.algo.evaluation_samples
    drawn: list[str] = []
    with engine.awake():
        greedy = engine.generate(encoded, seed=0, greedy=True).texts
        if samples:
            seed = seed_for(config.seed, "evaluation", step=at_step, rank=data_parallel_rank())
            drawn = engine.generate([prompt for prompt in encoded for _ in range(samples)], seed=seed).texts
    found = heldout_metrics(examples, prompts.verdicts(greedy, examples))
    if samples:
        repeated = [example for example in examples for _ in range(samples)]
        found |= sampled_metrics(examples, prompts.verdicts(drawn, repeated), samples=samples)
    return found
