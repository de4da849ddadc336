"""From responses, log-probs and values to what roles train on: the batch of one step and its advantages."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor

from trainer.algo.advantages import token_rewards
from trainer.algo.estimators import AdvantageEstimator, Estimate, Experience
from trainer.algo.kl import kl_estimate
from trainer.algo.masked import whiten
from trainer.config.schema import Config
from trainer.megatron.groups import agreed, data_parallel_group
from trainer.rollout.base import Responses


def agreed_responses(responses: Responses) -> Responses:
    """The responses, of which every rank that holds a part of the model has drawn the same; where a kernel is not
    deterministic, those of the first of these ranks. Collective over these."""
    values = {field.name: getattr(responses, field.name) for field in dataclasses.fields(responses)}
    on_host = {name: value.cpu() if isinstance(value, Tensor) else value for name, value in values.items()}
    return Responses(**agreed(on_host))


def batch_of(responses: Responses, scores: Sequence[float]) -> dict[str, Tensor]:
    """The tensors of this rank's responses (see :mod:`trainer.training.step`), on the device."""
    device = torch.cuda.current_device()
    tensors = {
        "tokens": responses.tokens,
        "response_mask": responses.response_mask[:, 1:],
        "engine_log_probs": responses.log_probs[:, 1:],
        "truncated": responses.truncated,
        "scores": torch.tensor(scores, dtype=torch.float32),
    }
    return {name: tensor.to(device) for name, tensor in tensors.items()}


def add_advantages(
    config: Config,
    batch: dict[str, Tensor],
    values: Tensor | None,
    *,
    estimator: AdvantageEstimator,
    kl_coef: float,
) -> Tensor:
    """Put advantages (with a critic also values and returns) into the batch -> the KL estimate per token [n, s-1].

    Args:
        values: [n, s], column t the value of the text up to and including tokens[:, t]; None without a critic.

    Raises:
        ValueError: the estimator gave something of another shape, or no returns for the critic.
    """
    settings, mask = config.algo, batch["response_mask"]
    kl = kl_estimate(
        batch["old_log_probs"],
        ref_log_probs=batch["ref_log_probs"],
        response_mask=mask,
        estimator=settings.kl.estimator,
        clamp=settings.kl.clamp,
    )
    rewards = token_rewards(
        batch["scores"],
        kl=kl,
        response_mask=mask,
        kl_coef=kl_coef if settings.kl.placement == "reward" else 0.0,
    )
    last_values = None
    if values is not None:
        batch["values"] = values[:, :-1]
        # The column of the last response token, where the critic has read the whole response.
        last = mask.shape[1] - mask.flip(1).int().argmax(dim=1, keepdim=True)
        last_values = values.gather(1, last).squeeze(1)
    experience = Experience(
        rewards=rewards,
        response_mask=mask,
        scores=batch["scores"],
        truncated=batch["truncated"],
        group_size=settings.responses_per_prompt,
        values=batch.get("values"),
        last_values=last_values,
    )
    with torch.no_grad():
        estimate = estimator.estimate(experience)
    _check_estimate(estimate, estimator, mask)
    batch["advantages"] = estimate.advantages
    if estimate.returns is not None and values is not None:
        batch["returns"] = estimate.returns
    if settings.whiten_advantages:
        batch["advantages"] = whiten(batch["advantages"], mask=mask, group=data_parallel_group())
    return kl


def _check_estimate(estimate: Estimate, estimator: AdvantageEstimator, mask: Tensor) -> None:
    wanted = {"advantages": estimate.advantages, **({"returns": estimate.returns} if estimator.needs_critic else {})}
    for name, tensor in wanted.items():
        if tensor is None or tensor.shape != mask.shape:
            raise ValueError(
                f"advantages._target_={type(estimator).__module__}.{type(estimator).__qualname__} gave {name} of shape "
                f"{None if tensor is None else tuple(tensor.shape)}, must be {tuple(mask.shape)} as the response mask"
            )
