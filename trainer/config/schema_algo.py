"""The typed section of an algorithm."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Optional

from trainer.common.limits import Limits, Words
from trainer.config.marks import Mark
from trainer.config.section import Section

AUTO = "auto"
SEEDS = Limits(-(2**63), 2**63 - 1)


@dataclass
class KlConfig(Section):
    placement: Annotated[str, Words("reward", "loss")]
    estimator: Annotated[str, Words("k1", "k2", "k3", "k1+", "k3+")]
    coef: Annotated[float, Limits(0, 1e6)]
    clamp: Annotated[float, Limits(0, 80)]  # exp of more overflows float32
    target: Annotated[Optional[float], Limits(0, 1e6)]  # noqa: UP045
    horizon: Annotated[int, Limits(1, 1_000_000_000)]


@dataclass
class OverlongConfig(Section):
    """``penalty``: what a response of ``rollout.max_new_tokens`` is paid less; less of it to those that have up to
    ``buffer`` tokens fewer (:func:`trainer.algo.shaping.overlong_penalty`). ``mask``: truncated ones teach nothing."""

    penalty: Annotated[float, Limits(0, 1e6)]
    buffer: Annotated[int, Limits(0, 100_000_000)]
    mask: bool


@dataclass
class AlgoConfig(Section):
    """``old_log_probs``: where the log-probs before training come from, a ``forward`` pass of their own or the one pass
    that trains (``training``); ``auto``: the latter where it gives the same. ``micro_batch_tokens``: null, a number, or
    ``auto`` until :mod:`trainer.plan.micro_batch` has put the largest that fits in its place."""

    num_steps: Annotated[int, Limits(0, 1_000_000_000)]
    warmup_steps: Annotated[int, Limits(0, 1_000_000_000)]
    warmup_lr: Annotated[float, Limits(0, 1000)]
    warmup_batch_size: Annotated[int, Limits(1, 1_000_000)]
    warmup_questions: Annotated[Optional[int], Limits(1, 1_000_000_000)]  # noqa: UP045
    prompts_per_step: Annotated[int, Limits(1, 1_000_000)]
    responses_per_prompt: Annotated[int, Limits(1, 1_000_000)]
    epochs: Annotated[int, Limits(1, 10_000)]
    minibatches: Annotated[int, Limits(1, 1_000_000)]
    shuffle_seed: Annotated[int, SEEDS, Mark.SEED]
    old_log_probs: Annotated[str, Words("auto", "forward", "training")]
    micro_batch_size: Annotated[int, Limits(1, 1_000_000)]
    micro_batch_tokens: Annotated[Any, Limits(1, 1_000_000_000, or_word=AUTO)]
    target_kl: Annotated[Optional[float], Limits(1e-9, 1e6)]  # noqa: UP045
    dynamic_sampling_rounds: Annotated[int, Limits(0, 1000)]
    reward_clip: Annotated[Optional[float], Limits(1e-9, 1e30)]  # noqa: UP045
    centre_scores: bool
    whiten_advantages: bool
    advantage_clip: Annotated[Optional[float], Limits(1e-9, 1e30)]  # noqa: UP045
    value_clip: Annotated[Optional[float], Limits(0, 1e6)]  # noqa: UP045
    entropy_coef: Annotated[float, Limits(0, 1e6)]  # with more, float32 gradients overflow
    loss_aggregation: Annotated[str, Words("token_mean", "sequence_mean", "fixed_length")]
    critic_loss_aggregation: Annotated[str, Words("token_mean", "sequence_mean", "fixed_length")]
    loss_length: Annotated[int, Limits(1, 100_000_000)]
    critic_warmup_steps: Annotated[int, Limits(0, 1_000_000_000)]
    start_critic_from_actor: Optional[bool]  # noqa: UP045
    heldout_prompts: Annotated[int, Limits(1, 1_000_000)]
    evaluation_samples: Annotated[int, Limits(0, 1000)]
    evaluate_every: Annotated[Optional[int], Limits(1, 1_000_000_000)]  # noqa: UP045
    kl: KlConfig
    overlong: OverlongConfig

    @property
    def uses_reference(self) -> bool:
        """Whether KL to the reference model counts, or may come to; otherwise nobody keeps or asks that model."""
        return self.kl.coef > 0 or self.kl.target is not None

    @property
    def needs_log_probs_before_training(self) -> bool:
        """Whether something reads them before the pass that trains, or later passes train on the same responses."""
        has_kl_in_reward = self.uses_reference and self.kl.placement == "reward"
        return self.epochs * self.minibatches > 1 or has_kl_in_reward

    @property
    def old_log_probs_come_from_training(self) -> bool:
        """Whether a step has no forward pass of its own for them; one that does not train the actor has it always."""
        return self.old_log_probs != "forward" and not self.needs_log_probs_before_training
