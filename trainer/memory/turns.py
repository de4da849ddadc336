"""Who is awake when. Roles and the engine ask here before they map memory, and say when their work is done.

Two ways: everything sleeps as soon as its work is done (:class:`EverythingSleeps`; also where the null saver lets
nothing sleep), or a schedule says what has to (:class:`trainer.memory.scheduled.Scheduled`, ``offload=auto``).
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Protocol, TypeVar

from trainer.plan.schedule import Schedule

Result = TypeVar("Result")


class Sleeper(Protocol):
    """A :class:`trainer.roles.role.Role`, or the rollout engine, which is one region and knows no kinds."""

    name: str

    def is_asleep(self, kind: str) -> bool: ...

    def sleep(self) -> None: ...


class Turns(Protocol):
    """See the module."""

    keeps_awake: bool  # what has done its work stays awake for now

    @property
    def schedule(self) -> Schedule | None:
        """What is followed, if anything is."""
        ...

    @property
    def can_make_room(self) -> bool:
        """Whether others than the phase needs are awake, and would sleep if it ran out of memory."""
        ...

    def add(self, sleeper: Sleeper) -> None:
        """It takes part from now on."""
        ...

    def begin(self, phase: str) -> None:
        """A phase of the loop begins."""
        ...

    def end(self, phase: str) -> None:
        """It has ended without an error."""
        ...

    def before_building(self, sleeper: str) -> None:
        """It is about to be built, which takes its memory."""
        ...

    def map(self, sleeper: str, kinds: Collection[str], action: Callable[[], None]) -> None:
        """Let ``action`` map those of ``kinds`` that are asleep."""
        ...

    def done(self, sleeper: Sleeper) -> None:
        """Its work is done."""
        ...

    def repeated(self, work: Callable[[], Result], *, is_collective: bool, meets: bool = False) -> Result:
        """What ``work`` returns. Where it runs out of GPU memory and others can make room, it is done once more.

        Args:
            is_collective: other ranks wait inside for this one.
            meets: but not before it has called :meth:`meet`, and it is done once more on all ranks.
        """
        ...

    def meet(self) -> None:
        """Inside repeated work: what follows is collective. Raises torch.OutOfMemoryError if another rank has run out
        of memory before."""
        ...


class EverythingSleeps:
    """Whoever has done its work sleeps at once."""

    keeps_awake = can_make_room = False
    schedule: Schedule | None = None

    def add(self, sleeper: Sleeper) -> None:
        pass

    def begin(self, phase: str) -> None:
        pass

    def end(self, phase: str) -> None:
        pass

    def before_building(self, sleeper: str) -> None:
        pass

    def map(self, sleeper: str, kinds: Collection[str], action: Callable[[], None]) -> None:
        action()

    def done(self, sleeper: Sleeper) -> None:
        sleeper.sleep()

    def repeated(self, work: Callable[[], Result], *, is_collective: bool, meets: bool = False) -> Result:
        return work()

    def meet(self) -> None:
        pass
