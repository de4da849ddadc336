"""Forward-only passes and optimizer steps of one role over a batch, through Megatron's schedules.

Losses are sums over tokens (or sequences) with their count; Megatron divides the summed gradients by the count over
all micro-batches and ranks, so no split changes a mean.

Ranks that hold the model together, or share sequences, pass the same batch and get the same results. Logits stay split
among tensor-parallel ranks; outputs exist on the last pipeline stage, which hands what was read off them to the others.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Generic

import torch
from megatron.core.models.gpt import GPTModel
from torch import Tensor

from trainer.algo import losses
from trainer.algo.kl import kl_estimate
from trainer.algo.masked import masked_sum, zero_padding
from trainer.algo.policy_losses import PolicyLoss
from trainer.config.schema import AlgoConfig
from trainer.data.batch import Experience, Sequences, SequencesT
from trainer.megatron.context_parallel import counted_once
from trainer.megatron.groups import (
    from_last_stage,
    is_last_stage,
    largest_over_ranks,
    sum_over_ranks,
    tensors_from_last_stage,
)
from trainer.megatron.moe import LoadBalance
from trainer.roles.role import FORWARD, Role
from trainer.training.micro_batches import Split, in_order, micro_batches
from trainer.training.model_input import ModelInput, Reader, TokenLogProbs, read_values

LossTerms = tuple[Tensor, Tensor, dict[str, Tensor]]


@dataclass(frozen=True)
class Loss(Generic[SequencesT]):
    """What is trained: what ``read`` takes from a model's output goes, after the micro-batch, into ``compute``, which
    gives (summed loss, its count, sums to report).

    ``aggregation``, ``fixed_length``: how :func:`trainer.algo.losses.aggregate` sums it.
    """

    read: Reader
    compute: Callable[..., LossTerms]
    aggregation: str
    fixed_length: int | None = None

    def sequence_weights(self, batch: SequencesT) -> Tensor:
        """[b]: what a loss of one per response token comes to, by sequence."""
        how = {"mode": self.aggregation, "fixed_length": self.fixed_length}
        rows = batch.response_mask.split(1)
        return torch.stack([losses.aggregate(row.float(), mask=row, **how)[0] for row in rows])


def _inputs(batches: Sequence[Sequences], split: Split) -> list[ModelInput]:
    """What the model is given of each micro-batch."""
    return [ModelInput.of(batch, packs=split.packs) for batch in batches]


def _forward(role: Role, batch: Sequences, read: Reader, *, split: Split) -> tuple[Tensor, ...]:
    """Forward-only passes; ``read`` turns each output into small tensors before the next micro-batch runs. They come
    back as tensors over the whole batch, the same on every rank that holds a part of the model."""
    role.require(FORWARD)
    parts = micro_batches(batch, split)

    def on_output(number: int, gpt: GPTModel, output: Tensor, *, non_loss_data: bool) -> Sequence[Tensor]:
        return read(gpt, inputs[number], output)

    with torch.no_grad():
        inputs = _inputs([part.take(batch) for part in parts], split)
        results = role.repeated(lambda: role.model.passes(inputs, on_output, forward_only=True))
    found = tuple(in_order(tensors, parts, batch=batch) for tensors in zip(*results, strict=True))
    return tensors_from_last_stage(found)


def log_probs(
    role: Role, batch: Sequences, *, temperature: float, vocab_size: int, split: Split
) -> tuple[Tensor, Tensor]:
    """Log-probs of the response tokens and entropies of their distributions under the role's active weights, each
    [n, s-1], zero elsewhere."""
    token_log_probs, entropy = _forward(role, batch, TokenLogProbs(temperature, vocab_size), split=split)
    return token_log_probs, entropy


def values(role: Role, batch: Sequences, *, split: Split) -> Tensor:
    """Values [n, s] in fp32: column t is the value of the text up to and including tokens[:, t]; by length, columns
    after a sequence's end may hold zeros."""
    return _forward(role, batch, read_values, split=split)[0]


def final_values(role: Role, batch: Sequences, *, split: Split) -> Tensor:
    """[n] fp32: the value of each whole response, 0 of an empty one."""
    return batch.at_the_end(values(role, batch, split=split)).where(batch.response_mask.any(dim=1), 0.0)


def train_minibatch(role: Role, batch: SequencesT, loss: Loss[SequencesT], *, split: Split) -> dict[str, float]:
    """One optimizer step. Without a single response token on any rank nothing is changed.

    Returns:
        The reported sums (largest values) over all micro-batches and ranks, plus ``loss_sum``, ``loss_count``,
        ``grad_norm`` and ``skipped`` (1.0 if the gradient norm was not finite); of a mixture of experts also
        ``aux_loss_sum``.
    """
    return role.repeated(lambda: _train_minibatch(role, batch, loss, split=split), trains=True)


def _train_minibatch(role: Role, batch: SequencesT, loss: Loss[SequencesT], *, split: Split) -> dict[str, float]:
    reports: list[dict[str, Tensor]] = []
    model = role.config.model
    balance, is_mixture = LoadBalance(layers=model.layers), model.num_experts is not None

    def on_output(number: int, gpt: GPTModel, output: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        numerator, count, stats = loss.compute(batches[number], *loss.read(gpt, inputs[number], output))
        reports.append({**stats, "loss_sum": numerator.detach().clone(), "loss_count": count})
        return numerator, counted_once(count.int()), {}

    def around(number: int) -> AbstractContextManager[None]:
        if not is_mixture:
            return nullcontext()
        packing, weights = inputs[number].packing, loss.sequence_weights(batches[number])
        sequence_of = None if packing is None else packing.sequence_of
        return balance.watch(batches[number].response_mask, weights=weights, sequence_of=sequence_of)

    with role.training():
        batches = [part.take(batch) for part in micro_batches(batch, split)]
        inputs = _inputs(batches, split)
        role.model.passes(inputs, on_output, forward_only=False, around=around, before_reducing=role.meet)
        aux_losses = balance.sums()
        result = from_last_stage(_over_ranks(summed(reports) | aux_losses) if is_last_stage() else {})
        updated, grad_norm = (True, 0.0) if result["loss_count"] == 0 else role.step()
    return {**result, "grad_norm": grad_norm, "skipped": float(not updated)}


def summed(reports: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    """The reports of micro-batches added up; of what is called ``..._max`` the largest."""
    whole = {name: torch.stack([report[name].double() for report in reports]) for name in reports[0]}
    return {name: values.max() if name.endswith("_max") else values.sum() for name, values in whole.items()}


def _over_ranks(sums: dict[str, Tensor]) -> dict[str, float]:
    """The same over data-parallel ranks."""
    largest = {name: value for name, value in sums.items() if name.endswith("_max")}
    rest = sum_over_ranks({name: value for name, value in sums.items() if name not in largest})
    return rest | (largest_over_ranks(largest) if largest else {})


def first_not_finite(role: Role, batch: SequencesT, loss: Loss[SequencesT], *, split: Split) -> str:
    """What comes first, in the pass of a minibatch, that is NaN or infinite: a weight, what a micro-batch's output was
    read as, or its loss. Runs the forward pass once more. Collective."""
    if names := role.model.not_finite():
        return f"the weights {names[0]} of the {role.name}"
    batches = [part.take(batch) for part in micro_batches(batch, split)]
    inputs = _inputs(batches, split)

    def on_output(number: int, gpt: GPTModel, output: Tensor, *, non_loss_data: bool) -> tuple[bool, bool]:
        found = loss.read(gpt, inputs[number], output)
        total, _, _ = loss.compute(batches[number], *found)
        return all(bool(tensor.isfinite().all()) for tensor in found), bool(total.isfinite())

    with torch.no_grad():
        flags = role.model.passes(inputs, on_output, forward_only=True)
    for number, (output_is_finite, loss_is_finite) in enumerate(from_last_stage(flags), start=1):
        if not (output_is_finite and loss_is_finite):
            read = "values" if role.spec.has_value_head else "log-probs"
            return f"the {'loss' if output_is_finite else read} of micro-batch {number} of {len(batches)}"
    return "nothing on this rank: its gradients, or what another rank computed"


def supervised_loss(*, vocab_size: int) -> Loss[Sequences]:
    """Cross-entropy of the response tokens, token mean."""

    def loss(batch: Sequences, token_log_probs: Tensor, entropy: Tensor) -> LossTerms:
        return *losses.aggregate(-token_log_probs, mask=batch.response_mask, mode="token_mean"), {}

    return Loss(TokenLogProbs(1.0, vocab_size), loss, "token_mean")


def policy_loss(
    settings: AlgoConfig, minimised: PolicyLoss, *, temperature: float, vocab_size: int, kl_coef: float
) -> Loss[Experience]:
    """The policy loss, minus the entropy bonus, plus KL to the reference where it is a loss; the three parts are
    reported too, as they are added up.

    Without log-probs from before, those of this pass are the old ones, and it reports what is read off them.
    """
    kl = settings.kl

    def loss(batch: Experience, token_log_probs: Tensor, entropy: Tensor) -> LossTerms:
        mask, old_log_probs = batch.response_mask, batch.old_log_probs
        old = token_log_probs.detach() if old_log_probs is None else old_log_probs
        per_token, stats = minimised.compute(token_log_probs, batch.policy_tokens(old))
        parts = {"policy_loss": per_token}
        if settings.entropy_coef:
            parts["entropy_loss"] = -settings.entropy_coef * zero_padding(entropy, mask=mask)
        observed = {}
        if kl.placement == "loss" and batch.ref_log_probs is not None:
            observed["kl"] = kl_estimate(
                token_log_probs,
                ref_log_probs=batch.ref_log_probs,
                response_mask=mask,
                estimator=kl.estimator,
                clamp=kl.clamp,
            )
            parts["kl_loss"] = kl_coef * observed["kl"]
        if old_log_probs is None:
            gap = (token_log_probs - batch.engine_log_probs).abs()
            observed |= {"entropy": entropy, "rollout_log_prob_gap": gap}
            stats |= {name: masked_sum(x.detach().double(), mask=mask) for name, x in observed.items()}
        how = {"mode": settings.loss_aggregation, "fixed_length": settings.loss_length}
        summed = {name: losses.aggregate(part, mask=mask, **how) for name, part in parts.items()}
        stats |= {f"{name}_sum": numerator.detach() for name, (numerator, _) in summed.items()}
        stats["tokens"] = mask.sum()
        numerators, counts = zip(*summed.values(), strict=True)
        return torch.stack(numerators).sum(), counts[0], stats

    return Loss(TokenLogProbs(temperature, vocab_size), loss, settings.loss_aggregation, settings.loss_length)


def value_loss(settings: AlgoConfig) -> Loss[Experience]:
    """Clipped squared error of the values before each response token."""

    def loss(batch: Experience, values: Tensor) -> LossTerms:
        mask = batch.response_mask
        assert batch.values is not None, "no critic judged this experience"
        assert batch.returns is not None
        per_token, stats = losses.value_loss(
            values[:, :-1],
            old_values=batch.values,
            returns=batch.returns,
            response_mask=mask,
            value_clip=settings.value_clip,
        )
        stats["tokens"] = mask.sum()
        summed = losses.aggregate(
            per_token, mask=mask, mode=settings.critic_loss_aggregation, fixed_length=settings.loss_length
        )
        return *summed, stats

    return Loss(read_values, loss, settings.critic_loss_aggregation, settings.loss_length)
