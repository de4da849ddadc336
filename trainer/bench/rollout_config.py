"""The settings of ``python -m trainer.bench.rollout``."""

from dataclasses import dataclass
from typing import List  # noqa: UP035  (omegaconf reads these annotations)

from trainer.config.schema import Section


@dataclass
class BenchRolloutConfig(Section):
    """The section ``bench``; its defaults lie in ``conf/bench_rollout.yaml``."""

    cases: List[str]  # noqa: UP006
    prompts: int
    prompt_tokens: int
    new_tokens: int
    many_prompts: int
    mean_tokens: int
    most_tokens: int
    long_prompts: int
    long_tokens: int
    vocab_size: int
    repeats: int
    case_timeout_seconds: int
