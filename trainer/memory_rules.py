"""The rules about weights tags, called by :func:`trainer.rules.check`."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from trainer.config import Config


def check_tags(config: Config) -> None:
    """Shares of a weights tag are those of a parameter buffer, which only the distributed optimizer has."""
    if config.memory.tags == "sharded" and not config.roles["actor"].ddp.use_distributed_optimizer:
        raise ValueError(
            "memory.tags=sharded with roles.actor.ddp.use_distributed_optimizer=false: ranks share the parameter "
            "buffer, which only the distributed optimizer has. Use roles.actor.ddp.use_distributed_optimizer=true, or "
            "memory.tags=full"
        )
