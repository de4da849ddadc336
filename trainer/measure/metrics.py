"""The numbers of one PPO step: global means over all tokens, sequences and data-parallel ranks."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from trainer.algo.groups import group_statistics
from trainer.algo.masked import explained_variance, moment_sums, variance_from_sums
from trainer.data.batch import Experience, RolloutBatch
from trainer.megatron.groups import gathered, largest_over_ranks, sum_over_ranks
from trainer.training.episodes import Tally

OBSERVED = ("kl", "entropy", "rollout_log_prob_gap")  # what log-probs before training say of a rollout
LOSS_PARTS = ("policy_loss", "kl_loss", "entropy_loss")  # they add up to actor/loss
_OF_EVERY_LOSS = {"loss_sum", "loss_count", "aux_loss_sum", "tokens", "grad_norm", "skipped"}
Sums = Sequence[dict[str, float]]  # of the optimizer steps of one PPO step, see step.train_minibatch


def of_rollout(batch: Experience) -> dict[str, float]:
    """Reward, lengths, how far the engine was from training, statistics of advantages, with a critic also of values
    and returns; of :data:`OBSERVED` what is known before training. Collective."""
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
    credit = {
        "value": batch.values,
        "return": batch.returns,
        "advantage": batch.estimated_advantages,
        "trained_advantage": batch.advantages,
    }
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
        **mismatch(batch),
    }
    for name in per_token:
        result[name if name in OBSERVED else f"{name}_mean"] = total[name] / tokens
    for name in credit:
        variance = variance_from_sums(count=tokens, total=total[name], square_total=total[f"{name}_square"])
        result[f"{name}_std"] = variance**0.5
    return result


def of_groups(batch: RolloutBatch, *, group_size: int) -> dict[str, float]:
    """The share of the groups of ``group_size`` responses to one question that are all paid alike. Collective."""
    found = group_statistics(batch.scores, valid=batch.response_mask.any(1), group_size=group_size)
    total = sum_over_ranks({"groups": len(batch) // group_size, "flat": (found.deviation[::group_size] == 0).sum()})
    return {"flat_group_fraction": total["flat"] / total["groups"]}


def of_drawing(rounds: int, *, groups: int, flat: int) -> dict[str, float]:
    """Rounds of a step's rollout; of all groups of responses that this rank drew in them, how many there are over all
    ranks and the share without a spread. Collective."""
    total = sum_over_ranks({"groups": groups, "flat": flat})
    return {
        "sampling/rounds": float(rounds),
        "sampling/groups": total["groups"],
        "sampling/flat_group_fraction": total["flat"] / total["groups"],
    }


def of_episodes(tally: Tally) -> dict[str, float]:
    """Turns of an episode, mean and most; the share that a limit has ended; calls of tools, those that failed and those
    that took too long. Collective."""
    total = sum_over_ranks({name: float(value) for name, value in vars(tally).items()})
    return {
        "episode/turns": total["turns"] / total["episodes"],
        "episode/turns_max": largest_over_ranks({"turns": tally.most_turns})["turns"],
        "episode/limited_fraction": total["limited"] / total["episodes"],
        "tools/calls": total["calls"],
        "tools/failures": total["failures"],
        "tools/timeouts": total["timeouts"],
    }


def mismatch(batch: Experience) -> dict[str, float]:
    """How the ratio w of the probabilities that training and the engine give the response tokens is spread: mean, 99th
    percentile, largest; effective sample size (sum w)^2 / sum w^2 as a share of the tokens (Kish 1965); share of the
    tokens that the correction weighs 0. Nothing of it is known before training where training itself gives log-probs.
    Collective."""
    mask = batch.response_mask
    if batch.old_log_probs is None:
        return {}
    ratio = (batch.old_log_probs - batch.engine_log_probs)[mask].double().exp()
    weights = batch.importance_weights
    masked = torch.zeros(()) if weights is None else (weights[mask] == 0).sum()
    sums = {"count": float(len(ratio)), "sum": ratio.sum(), "square": ratio.square().sum(), "masked": masked}
    total = sum_over_ranks(sums)
    count = int(total["count"])
    if not count:
        return {}
    above = count // 100 + 1  # so many at least are as large as the 99th percentile
    largest = sorted(
        (x for found in gathered(ratio.topk(min(above, len(ratio))).values.tolist()) for x in found), reverse=True
    )
    return {
        "mismatch/ratio": total["sum"] / count,
        "mismatch/ratio_p99": largest[above - 1],
        "mismatch/ratio_max": largest[0],
        "mismatch/effective_sample_size": total["sum"] ** 2 / (count * total["square"]),
        "mismatch/masked_fraction": total["masked"] / count,
    }


def ppo_kl(sums: Mapping[str, float]) -> float:
    """KL per token to the sampling policy in one optimizer step, before it."""
    return sums["ppo_kl"] / sums["tokens"] if sums["tokens"] else 0.0


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
    """The loss and its parts, clip fractions, ratios and KL to the sampling policy; nothing while only the critic
    trains. What training has found of :data:`OBSERVED`."""
    if sums is None:
        return {}
    parts = [part for part in LOSS_PARTS if f"{part}_sum" in sums[0]]
    reported = set(sums[0]) - _OF_EVERY_LOSS - {f"{part}_sum" for part in parts} - set(OBSERVED)
    largest = {name for name in reported if name.endswith("_max")}
    return {
        **{name: _mean(sums, name, "tokens") for name in OBSERVED if name in sums[0]},
        **_common(sums, "actor"),
        **{f"actor/{part}": _mean(sums, f"{part}_sum", "loss_count") for part in parts},
        "actor/clip_fraction": _mean(sums, "clip_fraction_low", "tokens") + _mean(sums, "clip_fraction_high", "tokens"),
        **{f"actor/{name}": _mean(sums, name, "tokens") for name in sorted(reported - largest)},
        **{f"actor/{name}": max(step[name] for step in sums) for name in sorted(largest)},
        "actor/ppo_kl_first": _mean(sums[:1], "ppo_kl", "tokens"),
        "actor/updates": float(len(sums)),
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
