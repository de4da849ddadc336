"""Before PPO: supervised steps of the actor on the task's own answers, and a critic that starts where they end."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import Tensor

from trainer.config.schema import Config
from trainer.data.prompts import Prompts
from trainer.megatron.optimizer import rise_and_fall
from trainer.megatron.sharding import OUTPUT
from trainer.roles.backuper import LazyTensors
from trainer.roles.role import Role
from trainer.training import step
from trainer.training.finite import require_finite_loss
from trainer.training.micro_batches import Split


def supervised_steps(
    config: Config, prompts: Prompts, actor: Role, *, vocab_size: int, on_step: Callable[[int, float], None]
) -> None:
    """Train the awake actor for ``algo.warmup_steps`` steps, then give it fresh optimizer state: what they left there
    would go on moving the policy. ``on_step`` is told the number and the mean loss of each.

    Raises:
        NotFinite: a loss is NaN or infinite.
    """
    settings, loss = config.algo, step.supervised_loss(vocab_size=vocab_size)
    for number in range(1, settings.warmup_steps + 1):
        share = rise_and_fall(number, total=settings.warmup_steps)
        actor.model.set_learning_rate(share * settings.warmup_lr)
        batch = prompts.supervised_batch(number)
        split = Split.of_training(config)
        sums = step.train_minibatch(actor, batch, loss, split=split)
        require_finite_loss([sums], actor, batch, loss, split=split, when=f"warm_up, its step {number}")
        on_step(number, sums["loss_sum"] / sums["loss_count"])
    if settings.warmup_steps:
        actor.restart_optimizer()


def start_critic_from(weights: Mapping[str, Tensor], critic: Role) -> None:
    """Give the awake critic the actor's body; its value head, which no actor has, starts anew (at zero)."""
    body = set(critic.model.tensors()) - {OUTPUT}
    critic.load_weights(LazyTensors(tuple(name for name in weights if name in body), weights.__getitem__))
