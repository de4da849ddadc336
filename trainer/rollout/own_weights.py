"""What engines with a copy of the actor's weights have in common: how it comes, and how it sleeps."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from trainer.config.schema import ModelConfig
from trainer.memory.regions import MemoryObserver
from trainer.memory.saver import Saver
from trainer.models.hf_bridge import check_names, file_names, to_hf
from trainer.plan.holdings import ENGINE
from trainer.roles.role import FORWARD, Role
from trainer.rollout import sleeping
from trainer.rollout.base import check_prompts


class OwnWeights:
    """The part of a :class:`trainer.rollout.base.RolloutEngine` that is not generation. A subclass loads weights.

    Its memory lies in saver regions without a backup: every wake-up brings new weights, so a sleep may lose them. What
    no weight sync brings (rotary tables) is kept on the host.
    """

    has_own_weights, name = True, ENGINE

    def __init__(self, model: ModelConfig, tags: Sequence[str], *, saver: Saver, observer: MemoryObserver) -> None:
        self._architecture, self._tags, self._saver, self._observe = model, tags, saver, observer
        self._host_copies: list[tuple[Tensor, Tensor]] = []
        self._is_loaded = False
        saver.turns.add(self)

    def _load(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Copy ``weights``, under their names in Hugging Face files, to where they belong."""
        raise NotImplementedError

    def sync(self, actor: Role) -> None:
        """Wake up with a copy of the actor's weights."""
        with actor.awake(kinds=FORWARD):
            self.wake_up(to_hf(actor.whole_weights(), model=self._architecture))

    @contextmanager
    def awake(self) -> Iterator[None]:
        """Rollouts happen inside; without weights, and as a rule asleep, after."""
        try:
            yield
        finally:
            self._is_loaded = False
            self._saver.turns.done(self)

    def is_asleep(self, kind: str = "") -> bool:
        return all(map(self._saver.is_asleep, self._tags))

    @torch.no_grad()
    def wake_up(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Map the regions, where they are asleep, and load ``weights``: every parameter under its name in Hugging
        Face files, tied ones once.

        Raises:
            ValueError: a parameter is missing, unknown or of another shape; the engine then holds no weights.
            MemoryError: the device has too little free memory; nothing was woken.
        """
        self._is_loaded = False
        self._saver.turns.map(self.name, (), self._map)
        for tensor, host_copy in self._host_copies:
            tensor.copy_(host_copy)
        wanted, given = file_names(self._architecture), set()

        def known() -> Iterator[tuple[str, Tensor]]:
            for name, weight in weights:
                given.add(name)
                if name in wanted:
                    yield name, weight

        self._load(known())
        check_names(given, wanted=wanted)
        self._is_loaded = True

    def _map(self) -> None:
        self._saver.check_room([tag for tag in self._tags if self._saver.is_asleep(tag)])
        for tag in self._tags:
            sleeping.wake_up(tag, self._saver, self._observe)

    def sleep(self) -> None:
        """Release what the engine holds; an engine that is asleep stays so."""
        self._is_loaded = False
        for tag in self._tags:
            sleeping.fall_asleep(tag, self._saver, self._observe)

    def close(self) -> None:
        """Nothing outlives the process."""

    def _check_ready(self, prompts: Sequence[Sequence[int]], *, longest: int) -> None:
        """Raises RuntimeError without weights, and ValueError for a prompt that is empty or too long."""
        if not self._is_loaded:
            raise RuntimeError("the rollout engine holds no weights: call wake_up(weights) first")
        check_prompts(prompts, longest=longest)
