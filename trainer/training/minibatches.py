"""All optimizer steps of a role in one PPO step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from torch import Tensor

from trainer.data.batch import Experience
from trainer.roles.role import Role
from trainer.training import step
from trainer.training.finite import require_finite_loss
from trainer.training.micro_batches import Split


def train_minibatches(
    role: Role,
    experience: Experience,
    loss: step.Loss[Experience],
    *,
    rows: Iterable[Tensor],
    split: Split,
    schedule: OptimizerParamScheduler,
    stops: Callable[[Mapping[str, float]], bool],
    when: str,
) -> list[dict[str, float]]:
    """Train the awake role on one minibatch after the other; the reported sums of each.

    None follow one after whose sums ``stops`` says so; the learning rate goes on as if they had.

    Args:
        rows: of the experience, a tensor for each minibatch, at least one.
        when: step and phase, for the message.

    Raises:
        NotFinite: no minibatch has a finite loss.
    """
    results, is_over = [], False
    for of_minibatch in rows:
        if not is_over:
            minibatch = experience.select(of_minibatch)
            results.append(step.train_minibatch(role, minibatch, loss, split=split))
            is_over = stops(results[-1])
        schedule.step(1)
    require_finite_loss(results, role, minibatch, loss, split=split, when=when)
    return results
