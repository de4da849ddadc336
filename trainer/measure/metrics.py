"""The numbers of one PPO step: global means over all tokens, sequences and data-parallel ranks."""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import Tensor

from trainer.algo.masked import explained_variance, moment_sums, variance_from_sums
from trainer.data.batch import Experience
from trainer.megatron.groups import sum_over_ranks

OBSERVED = ("kl", "entropy", "rollout_log_prob_gap")  # what log-probs before training say of a rollout
Sums = Sequence[dict[str, float]]  # of the optimizer steps of one PPO step, see step.train_minibatch


def of_rollout(batch: Experience) -> dict[str, float]:
    """Reward, lengths, statistics of advantages, with a critic also of values and returns; of :data:`OBSERVED` what is
    known before training. Collective."""
    mask, scores = batch.response_mask, batch.scores.double()
    sums: dict[str, Tensor | float] = {
        "sequences": len(scores),
        "tokens": mask.sum(),
        "reward": scores.sum(),
        "reward_square": (scores**2).sum(),
        "truncated": batch.truncated.sum(),
    }
    observed = {"kl": batch.kl, "entropy": batch.entropy}
    if batch.old_log_probs is not None:
        observed[OBSERVED[-1]] = (batch.old_log_probs - batch.engine_log_probs).abs()
    credit = {"value": batch.values, "return": batch.returns, "advantage": batch.advantages}
    credit = {name: x for name, x in credit.items() if x is not None}
    per_token = {name: x for name, x in observed.items() if x is not None} | credit
    for name, x in per_token.items():
        sums[name], sums[f"{name}_square"] = moment_sums(x, mask=mask)
    total = sum_over_ranks(sums)
    sequences, tokens = total["sequences"], max(total["tokens"], 1.0)
    result = {
        "reward": total["reward"] / sequences,
        "reward_std": variance_from_sums(count=sequences, total=total["reward"], square_total=total["reward_square"])
        ** 0.5,
        "response_length": total["tokens"] / sequences,
        "truncated_fraction": total["truncated"] / sequences,
        "response_tokens": total["tokens"],
    }
    for name in per_token:
        result[name if name in OBSERVED else f"{name}_mean"] = total[name] / tokens
    for name in credit:
        variance = variance_from_sums(count=tokens, total=total[name], square_total=total[f"{name}_square"])
        result[f"{name}_std"] = variance**0.5
    return result


def _mean(sums: Sums, numerator: str, denominator: str) -> float:
    count = sum(step[denominator] for step in sums)
    return sum(step[numerator] for step in sums) / count if count else 0.0


def _common(sums: Sums, role: str) -> dict[str, float]:
    norms = [step["grad_norm"] for step in sums if not step["skipped"]]
    has_experts = "aux_loss_sum" in sums[0]
    return {
        **({f"{role}/aux_loss": _mean(sums, "aux_loss_sum", "loss_count")} if has_experts else {}),
        f"{role}/loss": _mean(sums, "loss_sum", "loss_count"),
        f"{role}/grad_norm": sum(norms) / len(norms) if norms else math.nan,
        f"{role}/skipped_steps": sum(step["skipped"] for step in sums),
    }


def of_actor(sums: Sums | None) -> dict[str, float]:
    """Policy loss, clip fractions and KL to the sampling policy; nothing while only the critic trains. What training
    has found of :data:`OBSERVED`."""
    if sums is None:
        return {}
    return {
        **{name: _mean(sums, name, "tokens") for name in OBSERVED if name in sums[0]},
        **_common(sums, "actor"),
        "actor/clip_fraction": _mean(sums, "clip_fraction_low", "tokens") + _mean(sums, "clip_fraction_high", "tokens"),
        "actor/clip_fraction_low": _mean(sums, "clip_fraction_low", "tokens"),
        "actor/clip_fraction_high": _mean(sums, "clip_fraction_high", "tokens"),
        "actor/clip_fraction_dual": _mean(sums, "clip_fraction_dual", "tokens"),
        "actor/ratio": _mean(sums, "ratio", "tokens"),
        "actor/ppo_kl": _mean(sums, "ppo_kl", "tokens"),
        "actor/ppo_kl_first": _mean(sums[:1], "ppo_kl", "tokens"),
    }


def of_critic(sums: Sums | None) -> dict[str, float]:
    """Value loss, clip fraction and explained variance; nothing without a critic."""
    if sums is None:
        return {}
    total = {name: sum(step[name] for step in sums) for name in sums[0]}
    return {
        **_common(sums, "critic"),
        "critic/clip_fraction": _mean(sums, "value_clip_fraction", "tokens"),
        "critic/explained_variance": explained_variance(
            count=total["tokens"],
            returns=total["returns"],
            returns_square=total["returns_square"],
            residual=total["residual"],
            residual_square=total["residual_square"],
        ),
    }
