"""From responses, log-probs and values to what roles train on: the batch of one step and its advantages."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor

from trainer.algo.advantages import token_rewards
from trainer.algo.estimators import AdvantageEstimator, Estimate, ScoredResponses
from trainer.algo.kl import kl_estimate
from trainer.algo.masked import centre, whiten
from trainer.algo.mismatch import Correction
from trainer.config.schema import AlgoConfig
from trainer.data.batch import Experience, RolloutBatch
from trainer.megatron.groups import data_parallel_group
from trainer.training import finite


@dataclasses.dataclass(frozen=True)
class Judgement:
    """What the roles' forward passes say of a rollout.

    Attributes:
        ref_log_probs, old_log_probs, entropy: [n, s-1] or None, as in :class:`~trainer.data.batch.Experience`.
        values: [n, s], column t the value of the text up to and including tokens[:, t]; None without a critic.
    """

    ref_log_probs: Tensor | None
    old_log_probs: Tensor | None
    entropy: Tensor | None
    values: Tensor | None


@dataclasses.dataclass(frozen=True)
class Credit:
    """How tokens are credited: the estimator of their advantages, and the weights of those that the engine drew
    otherwise than training computes."""

    estimator: AdvantageEstimator
    correction: Correction


def experience_of(
    drawn: RolloutBatch, judged: Judgement, *, settings: AlgoConfig, credit: Credit, kl_coef: float
) -> Experience:
    """Credit the rollout's tokens. Collective over the data-parallel ranks where scores are centred or advantages
    whitened.

    Raises:
        ValueError: the estimator gave something of another shape, or no returns for the critic.
        NotFinite: of finite numbers the estimator, or the correction, made such that are not.
    """
    mask, values = drawn.response_mask, judged.values
    kl = None
    if judged.old_log_probs is not None and judged.ref_log_probs is not None:
        kl = kl_estimate(
            judged.old_log_probs,
            ref_log_probs=judged.ref_log_probs,
            response_mask=mask,
            estimator=settings.kl.estimator,
            clamp=settings.kl.clamp,
        )
    assert kl is not None or settings.kl.placement == "loss" or not kl_coef, "KL in the reward needs both log-probs"
    scores = drawn.scores
    if settings.reward_clip is not None:
        scores = scores.clamp(-settings.reward_clip, settings.reward_clip)
    if settings.centre_scores:
        scores = centre(scores, valid=mask.any(1), group=data_parallel_group())
    rewards = token_rewards(
        scores,
        turn_rewards=drawn.turn_rewards,
        kl=torch.zeros(mask.shape, device=mask.device) if kl is None else kl,
        response_mask=mask,
        kl_coef=kl_coef if settings.kl.placement == "reward" else 0.0,
    )
    with torch.no_grad():
        estimate = credit.estimator.estimate(
            ScoredResponses(
                rewards=rewards,
                response_mask=mask,
                scores=scores,
                truncated=drawn.truncated,
                group_size=settings.responses_per_prompt,
                values=None if values is None else values[:, :-1],
                last_values=None if values is None else drawn.at_the_end(values),
            )
        )
    _check_estimate(estimate, credit.estimator, mask, given=(rewards, values))
    advantages = estimate.advantages
    if settings.whiten_advantages:
        advantages = whiten(advantages, mask=mask, group=data_parallel_group())
    if settings.advantage_clip is not None:
        advantages = advantages.clamp(-settings.advantage_clip, settings.advantage_clip)
    weights = None
    if judged.old_log_probs is not None:
        log_ratio = judged.old_log_probs - drawn.engine_log_probs
        weights = credit.correction.weights(log_ratio, response_mask=mask)
    if weights is not None:
        _require_finite(weights, mask, given=(log_ratio,), source=_named("mismatch", credit.correction))
        advantages = advantages * weights
    if settings.overlong.mask:
        advantages = advantages.masked_fill(drawn.truncated[:, None], 0.0)
    return Experience(
        **vars(drawn),
        ref_log_probs=judged.ref_log_probs,
        old_log_probs=judged.old_log_probs,
        entropy=judged.entropy,
        kl=kl,
        estimated_advantages=estimate.advantages,
        advantages=advantages,
        importance_weights=weights,
        values=None if values is None else values[:, :-1],
        returns=None if values is None else estimate.returns,
    )


def _check_estimate(
    estimate: Estimate, estimator: AdvantageEstimator, mask: Tensor, *, given: Sequence[Tensor | None]
) -> None:
    source = _named("advantages", estimator)
    wanted = {"advantages": estimate.advantages, **({"returns": estimate.returns} if estimator.needs_critic else {})}
    for name, tensor in wanted.items():
        if tensor is None or tensor.shape != mask.shape:
            raise ValueError(
                f"{source} gave {name} of shape {None if tensor is None else tuple(tensor.shape)}, must be "
                f"{tuple(mask.shape)} as the response mask"
            )
        _require_finite(tensor, mask, given=given, source=source)


def _require_finite(made: Tensor, mask: Tensor, *, given: Sequence[Tensor | None], source: str) -> None:
    """What a piece made of the response tokens is finite. Where it was given what is not, the loss tells of that."""
    is_sound = all(bool(tensor.isfinite().all()) for tensor in given if tensor is not None)
    finite.require_finite(made[mask] if is_sound else made[:0], source=source, when="advantages")


def _named(section: str, piece: object) -> str:
    return f"{section}._target_={type(piece).__module__}.{type(piece).__qualname__}"
