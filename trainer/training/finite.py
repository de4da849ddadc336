"""When training stops being any: scores, advantages or losses that are not finite, and optimizer steps that are all
skipped."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from torch import Tensor

from trainer.data.batch import SequencesT
from trainer.megatron.groups import sum_over_ranks
from trainer.roles.role import Role
from trainer.training import step
from trainer.training.micro_batches import Split


class NotFinite(RuntimeError):
    """Ends a run whose numbers are not finite; names phase, micro-batch and the first that is not."""


def require_finite_loss(
    results: Sequence[Mapping[str, float]],
    role: Role,
    minibatch: SequencesT,
    loss: step.Loss[SequencesT],
    *,
    split: Split,
    when: str,
) -> None:
    """Raise NotFinite if none of ``results``, of :func:`trainer.training.step.train_minibatch`, has a finite loss.
    Collective. Such steps were skipped, so the role's weights are as before them.

    Args:
        minibatch, loss, split: those of the last result, in which the first number is looked for that is not finite.
        when: step and phase, for the message.
    """
    if any(math.isfinite(result["loss_sum"]) for result in results):
        return
    found = step.first_not_finite(role, minibatch, loss, split=split)
    raise NotFinite(f"{when}: the loss of every minibatch is NaN or infinite. The first that is not finite: {found}")


def require_finite(numbers: Tensor, *, source: str, when: str) -> None:
    """Raise NotFinite on every rank if ``numbers``, which ``source`` gave, hold NaN or infinity on one of them.
    Collective over the data-parallel ranks."""
    count = sum_over_ranks({"": (~numbers.isfinite()).sum()})[""]
    if count:
        raise NotFinite(f"{when}: {source} gave {count:.0f} numbers that are NaN or infinite")


def require_progress(records: Sequence[Mapping[str, float]], role: str, *, optimizer_steps: int) -> None:
    """Raise NotFinite if ``records`` of successive steps say that all ``optimizer_steps`` of the role were skipped in
    each of them. One step without any is a spike; more are the end of training."""
    if all(record.get(f"{role}/skipped_steps", 0) >= optimizer_steps for record in records):
        raise NotFinite(
            f"steps {', '.join(str(record['step']) for record in records)}, train_{role}: every optimizer step was "
            f"skipped, since its gradient norm was not finite, although its loss was"
        )
