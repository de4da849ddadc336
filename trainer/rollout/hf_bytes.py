"""What :class:`trainer.rollout.hf.HfEngine` holds, from the config alone."""

from __future__ import annotations

from trainer.config.schema import Config
from trainer.plan.holdings import EngineBytes, engine_bytes
from trainer.plan.layout import WHOLE, parameters, rotary_table_bytes


def planned(config: Config, *, vocab_size: int) -> EngineBytes:
    """transformers' model, whole on every rank: the actor's parameters and the rotary table, which it keeps twice."""
    model = config.roles["actor"].model
    found = parameters(model, vocab_size=vocab_size, value_head=False, parallel=WHOLE)
    size = sum(parameter.size_bytes for parameter in found) + 2 * rotary_table_bytes(model)
    return engine_bytes(config, {"weights": (size, "synced from the actor every step")}, has_own_weights=True)
