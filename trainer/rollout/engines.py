"""The engines that ``rollout=`` chooses from: what each plans to hold, and how it is built.

To add one, write it (:class:`trainer.rollout.base.RolloutEngine`), enter it in :data:`ENGINES` and give it a file in
``conf/rollout/``. This module imports neither transformers nor megatron, since the parent asks for the plan.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from trainer.config.schema import Config
from trainer.plan.holdings import EngineBytes
from trainer.rollout import hf_bytes
from trainer.rollout.base import RolloutEngine
from trainer.rollout.native import cache
from trainer.rollout.vllm_engine import held

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

    from trainer.memory.regions import MemoryObserver
    from trainer.memory.saver import Saver
    from trainer.roles.role import Role


class Planner(Protocol):
    """What an engine will hold on the rank that holds most, from a validated config alone."""

    def __call__(self, config: Config, *, vocab_size: int) -> EngineBytes: ...


class Builder(Protocol):
    """A new engine; it holds device memory until it is put to sleep."""

    def __call__(
        self,
        config: Config,
        *,
        actor: Role,
        tokenizer: PreTrainedTokenizerFast,
        saver: Saver,
        observer: MemoryObserver,
    ) -> RolloutEngine: ...


@dataclass(frozen=True)
class EngineKind:
    """One engine by its name in ``rollout.engine``."""

    plan: Planner
    build: Builder


def _build_hf(
    config: Config, *, actor: Role, tokenizer: PreTrainedTokenizerFast, saver: Saver, observer: MemoryObserver
) -> RolloutEngine:
    from trainer.rollout.hf import HfEngine

    return HfEngine(actor.config.model, config.rollout, tokenizer=tokenizer, saver=saver, observer=observer)


def _build_native(
    config: Config, *, actor: Role, tokenizer: PreTrainedTokenizerFast, saver: Saver, observer: MemoryObserver
) -> RolloutEngine:
    from trainer.rollout.native.engine import NativeEngine

    model, rollout, kv_cache = actor.config.model, config.rollout, cache.of_run(config)
    return NativeEngine(actor, model, rollout, cache=kv_cache, tokenizer=tokenizer, saver=saver, observer=observer)


def _build_vllm(
    config: Config, *, actor: Role, tokenizer: PreTrainedTokenizerFast, saver: Saver, observer: MemoryObserver
) -> RolloutEngine:
    from trainer.rollout.vllm_engine.engine import VllmEngine

    model, rollout, kv_cache = actor.config.model, config.rollout, held.cache(config)
    return VllmEngine(model, rollout, cache=kv_cache, tokenizer=tokenizer, saver=saver, observer=observer)


ENGINES: Mapping[str, EngineKind] = {
    "native": EngineKind(plan=cache.planned, build=_build_native),
    "hf": EngineKind(plan=hf_bytes.planned, build=_build_hf),
    "vllm": EngineKind(plan=held.planned, build=_build_vllm),
}


def planned_bytes(config: Config, *, vocab_size: int) -> EngineBytes:
    """What the run's engine will hold; ``vocab_size``: entries of its tokenizer."""
    return ENGINES[config.rollout.engine].plan(config, vocab_size=vocab_size)


def make_engine(
    config: Config, *, actor: Role, tokenizer: PreTrainedTokenizerFast, saver: Saver, observer: MemoryObserver
) -> RolloutEngine:
    """The run's engine, asleep. ``observer`` takes a memory record of every sleep and wake-up."""
    build = ENGINES[config.rollout.engine].build
    engine = build(config, actor=actor, tokenizer=tokenizer, saver=saver, observer=observer)
    engine.sleep()
    return engine
