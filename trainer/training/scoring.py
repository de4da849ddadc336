"""Log-probs of a rollout's responses, under every set of the actor's weights that a step needs them of."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack

from torch import Tensor

from trainer.config.roles import REFERENCE
from trainer.config.schema import Config
from trainer.data.batch import RolloutBatch
from trainer.roles.role import FORWARD, Role
from trainer.training import step
from trainer.training.micro_batches import Split

REFERENCE_PHASE, LOG_PROBS_PHASE = "ref_log_probs", "log_probs"


def scored_log_probs(
    config: Config,
    actor: Role,
    drawn: RolloutBatch,
    *,
    trains_actor: bool,
    vocab_size: int,
    phase: Callable[[str], AbstractContextManager[None]],
) -> dict[str, tuple[Tensor, Tensor]]:
    """Phase -> log-probs and entropies, each [n, s-1], of its weights: those of the phases that the step needs, in one
    wake-up of the actor. The reference's are needed where a KL term is; those of the weights that drew the responses
    where the actor is trained on them (``trains_actor``) more than once, or only watched. ``phase`` gives the context
    of the phase of a name."""
    weights_of = {
        REFERENCE_PHASE: REFERENCE if config.algo.uses_reference else None,
        LOG_PROBS_PHASE: None if trains_actor and config.algo.old_log_probs_come_from_training else actor.name,
    }
    wanted = {name: tag for name, tag in weights_of.items() if tag is not None}
    how = {"temperature": config.rollout.temperature, "vocab_size": vocab_size, "split": Split.of_scoring(config)}
    found = {}
    with ExitStack() as awake:
        for name, tag in wanted.items():
            with phase(name):
                if found:
                    actor.switch_to(tag)
                else:
                    awake.enter_context(actor.awake(kinds=FORWARD, tag=tag))
                found[name] = step.log_probs(actor, drawn, **how)
                if len(found) == len(wanted):
                    awake.close()
    return found
