"""Sleep by a schedule (``offload=auto``): what it lets stay awake does so until a phase begins without room for it."""

from __future__ import annotations

import gc
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from trainer.megatron.groups import gathered_of_shares, max_over_ranks
from trainer.memory.hand_over import HandOver
from trainer.memory.turns import Result, Sleeper
from trainer.plan.holdings import ENGINE
from trainer.plan.schedule import Schedule, State

_MARGIN = 1.1  # of what was measured: the allocator's blocks do not fit each other exactly


class _ShortElsewhereError(torch.OutOfMemoryError):
    pass


class Scheduled:
    """A :class:`trainer.memory.turns.Turns` that follows a schedule.

    In phases that the schedule does not have (evaluations, checkpoints) whoever wakes up makes the room that it needs.

    Args:
        replan: phase -> bytes that no region holds -> the schedule with these.
        outside_bytes: what no region has held in the phase that ends, at most; None if that cannot be measured.
        note: takes a line for the reader.
        ranks: of the whole run.
    """

    keeps_awake = True

    def __init__(
        self,
        schedule: Schedule,
        *,
        replan: Callable[[Mapping[str, int]], Schedule | None],
        outside_bytes: Callable[[], int | None] = lambda: None,
        note: Callable[[str], None],
        ranks: int = 1,
    ) -> None:
        self.schedule: Schedule = schedule
        self._replan, self._note, self._ranks = replan, note, ranks
        self._outside_bytes = outside_bytes
        self._sizes = {region.name: region.size_bytes for region in schedule.regions}
        self._sleepers: dict[str, Any] = {}
        self._busy: dict[str, frozenset[str]] = {}
        self._phase, self._placed_tags = "", schedule.resident_tags
        self._reserves = {phase.name: phase.reserve_bytes for phase in (*schedule.phases, *schedule.occasional)}
        self._measured: dict[str, int] | None = {}  # by phase, until the first step has ended
        self._tight: set[str] = set()  # phases that have run out of memory
        self._hand_over: HandOver | None = None
        self._is_meeting_due = False
        self._thread, self._stream = ThreadPoolExecutor(1, thread_name_prefix="hand-over"), None

    def add(self, sleeper: Sleeper) -> None:
        self._sleepers[sleeper.name] = sleeper

    @property
    def awake(self) -> list[str]:
        """The regions that hold GPU memory now, the largest first."""
        return [name for name in sorted(self._sizes, key=lambda name: -self._sizes[name]) if self._is_awake(name)]

    def _is_awake(self, region: str) -> bool:
        owner, _, kind = region.partition("/")
        if kind.startswith("weights/"):
            return kind.removeprefix("weights/") in self._placed_tags
        kind = "rest" if kind == "param" else kind  # they sleep together, and not every role has both
        return owner in self._sleepers and not self._sleepers[owner].is_asleep(kind)

    def _used(self) -> frozenset[str]:
        """What is at work now, or is by the schedule."""
        uses = next((phase.uses for phase in self.schedule.phases if phase.name == self._phase), frozenset[str]())
        return uses.union(*self._busy.values())

    def _idle(self) -> list[str]:
        used = self._used()
        return [name for name in self.awake if name not in used and "/weights/" not in name]

    @property
    def can_make_room(self) -> bool:
        return bool(self._idle())

    def _is_in_step(self, phase: str) -> bool:
        return any(one.name == phase for one in self.schedule.phases)

    def begin(self, phase: str) -> None:
        self._settle()
        self._phase = phase
        if not self._is_in_step(phase):
            return
        self._busy.clear()
        if phase == self.schedule.phases[0].name:
            self._correct()
        allowed = self.schedule.awake(phase)
        going = [name for name in self.awake if name not in allowed and "/weights/" not in name]
        coming = self._coming(allowed) if any(self._has_keeper(name) for name in going) else None
        if coming is None:
            self._put_to_sleep(going)
        else:
            self._hand_to(coming, going)
        self._place_tags(self.schedule.resident_tags)
        for name in self._sizes:
            owner, _, kind = name.partition("/")
            sleeper, state = self._sleepers.get(owner), self.schedule.state(name, phase)
            if kind != "optim" or sleeper is None:
                continue
            if state is State.GOES:
                sleeper.regions.start_saving()
            elif state in (State.COMES, State.STAYS) and sleeper.is_asleep(kind):
                self._fetch(owner)

    def _fetch(self, owner: str) -> None:
        """Map the sleeping optimizer state and begin to copy it back, beside other work."""
        self._map(lambda: self._sleepers[owner].regions.wake_up({"optim"}, backuper_bytes={}))

    def _has_keeper(self, region: str) -> bool:
        owner, _, kind = region.partition("/")
        return kind == "optim" and owner in self._sleepers and self._sleepers[owner].regions.has_keeper

    def _coming(self, allowed: Collection[str]) -> str | None:
        """The role whose optimizer state sleeps and may be awake, if it is one alone and can come piece by piece."""
        found = [name for name in allowed if self._has_keeper(name) and not self._is_awake(name)]
        return found[0].partition("/")[0] if len(found) == 1 else None

    def _hand_to(self, coming: str, going: Collection[str]) -> None:
        """Let optimizer states among ``going`` leave while that of ``coming`` arrives, and the others leave: those that
        nobody keeps before, so that there is room to begin with, what is copied beside it."""
        regions = {region.name: region for region in self.schedule.regions}
        states = [name for name in going if self._has_keeper(name)]
        owners = [name.partition("/")[0] for name in states]
        copied = [n for n in going if n not in states and regions[n].leave_bytes and n.partition("/")[0] in owners]
        self._put_to_sleep([name for name in going if name not in (*states, *copied)])
        lasting = self.schedule.awake_bytes(self._phase) - self._sizes[f"{coming}/optim"] + self._reserve()
        later = sum(self._sizes[name] for name in copied)
        self._sleepers[coming].regions.wait_for_device()
        self._hand_over = HandOver(
            [self._sleepers[owner].regions for owner in owners],
            self._sleepers[coming].regions,
            room_bytes=self.schedule.room_bytes - lasting - later,
            retry=lambda: self._fetch(coming),
        )
        self._stream = self._stream or torch.cuda.Stream()
        self._hand_over.start(self._thread, self._stream)
        self._put_to_sleep(copied)
        self._hand_over.give_room(later)

    def _settle(self) -> None:
        if self._hand_over is not None:
            hand_over, self._hand_over = self._hand_over, None
            hand_over.settle()

    def end(self, phase: str) -> None:
        self._settle()
        outside = self._outside_bytes() if self._measured is not None and self._is_in_step(phase) else None
        if outside is not None:
            assert self._measured is not None
            self._measured[phase] = max(outside, self._measured.get(phase, 0))

    def _correct(self) -> None:
        """Plan anew with what the first whole step has shown."""
        names = [phase.name for phase in self.schedule.phases]
        if self._measured is None or not self._measured.keys() >= set(names):
            return
        shown, self._measured = self._measured, None
        own = {name: max_over_ranks(int(_MARGIN * shown[name])) for name in names}
        everyones = gathered_of_shares(own)  # who may share copies of tags too, which change their place together
        most = {name: max(found[name] for found in everyones) for name in names}
        self._plan_with({**self._reserves, **most})

    def _place_tags(self, tags: frozenset[str]) -> None:
        if tags != self._placed_tags:
            self._placed_tags = tags
            for sleeper in self._sleepers.values():
                if sleeper.name != ENGINE:
                    sleeper.place_tags(tags)

    def _put_to_sleep(self, names: Collection[str]) -> None:
        for owner in dict.fromkeys(name.partition("/")[0] for name in names):
            kinds = {name.partition("/")[2] for name in names if name.partition("/")[0] == owner}
            sleeper = self._sleepers[owner]
            sleeper.sleep() if owner == ENGINE else sleeper.sleep(kinds=kinds)

    def before_building(self, sleeper: str) -> None:
        needed = [name for name in self._sizes if name.partition("/")[0] == sleeper and "/weights/" not in name]
        self._make_room(needed)

    def _make_room(self, needed: Collection[str]) -> None:
        kept = {*needed, *self._used()}
        self._put_to_sleep(self.schedule.victims(self.awake, needed=kept, beside_bytes=self._reserve()))

    def _reserve(self) -> int:
        return self._reserves.get(self._phase, max(self._reserves.values()))

    def map(self, sleeper: str, kinds: Collection[str], action: Callable[[], None]) -> None:
        wanted = {sleeper} if sleeper == ENGINE else {f"{sleeper}/{kind}" for kind in kinds}
        needed = frozenset(wanted & self._sizes.keys())
        self._busy[sleeper] = self._busy.get(sleeper, frozenset()) | needed
        if not (self._is_in_step(self._phase) and needed <= self.schedule.awake(self._phase)):
            self._make_room(needed)
        self._map(action)

    def _map(self, action: Callable[[], None]) -> None:
        try:
            action()
            return
        except MemoryError as error:
            if self._ranks > 1 or not self.can_make_room:
                raise
            why = str(error)
        self._say(f"{why.partition(':')[0]}; {self._evict()}")
        action()

    def done(self, sleeper: Sleeper) -> None:
        self._busy.pop(sleeper.name, None)

    def _evict(self) -> str:
        """Let all sleep that nobody uses now, and plan for it -> what that was, in words."""
        self._settle()
        going = self._idle()
        self._put_to_sleep(going)
        missing = sum(self._sizes[name] for name in going)
        if not going and self._placed_tags:
            missing = sum(self._sizes[name] for name in self._sizes if "/weights/" in name and self._is_awake(name))
            going = [f"the copies of {', '.join(sorted(self._placed_tags))}"]
            self._place_tags(frozenset())
        if missing and self._is_in_step(self._phase):
            self._plan_with(self._reserves | {self._phase: self._reserve() + missing})
        return f"{', '.join(going)} made room" if going else ""

    def repeated(self, work: Callable[[], Result], *, is_collective: bool, meets: bool = False) -> Result:
        if is_collective and not meets and self._ranks > 1:
            return work()
        while True:
            result, is_short = None, False
            can_help = self.can_make_room or bool(self._placed_tags)
            self._is_meeting_due = meets and can_help and self._ranks > 1
            try:
                result = work()
            except _ShortElsewhereError:
                is_short = True
            except torch.OutOfMemoryError:
                if not can_help or (meets and not self._tell_others()):
                    raise
                is_short = True  # its traceback, which holds the work's tensors, is gone when others make room
            if self._ranks > 1 and can_help and not meets:
                is_short = bool(max_over_ranks(int(is_short)))
            if not is_short:
                return result  # type: ignore[return-value]
            del result
            gc.collect()
            torch.cuda.empty_cache()
            self._say(f"the phase {self._phase} ran out of GPU memory: {self._evict()}, and it is repeated")

    def meet(self) -> None:
        if self._is_meeting_due:
            self._is_meeting_due = False
            if max_over_ranks(0):
                raise _ShortElsewhereError("another rank has run out of GPU memory")

    def _tell_others(self) -> bool:
        """Meet them without memory, unless that is too late."""
        if self._ranks > 1 and self._is_meeting_due:
            self._is_meeting_due = False
            max_over_ranks(1)
            return True
        return self._ranks == 1

    def _plan_with(self, reserves: Mapping[str, int]) -> None:
        """Later steps follow the schedule that leaves so much, if there is one."""
        try:
            schedule = self._replan(reserves)
        except ValueError:
            return
        assert schedule is not None
        self.schedule, self._reserves = schedule, dict(reserves)

    def _say(self, line: str) -> None:
        """Once for each phase."""
        if self._phase not in self._tight:
            self._tight.add(self._phase)
            self._note(line)
