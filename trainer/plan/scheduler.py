"""Finds the schedule that moves the fewest bytes: a cache whose requests are known beforehand (Belady, "A study of
replacement algorithms", 1966), for a loop and for objects of different sizes and costs.

Between two uses of a region lies a *gap*: the phases that do not use it. Sleeping in a part of a gap costs the copies
of sleeping in all of it and frees less, so a schedule is one choice per gap: sleep or stay. Only a region from which
another one is rebuilt may be worth its room for a part of a gap, so there the part is a choice too. Branch and bound
looks through all choices. The bound: in every phase so many bytes still have to go, at the least cost per byte of those
that may (the relaxed knapsack of Dantzig, 1957).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from trainer.plan.gaps import Gap, gaps_of
from trainer.plan.schedule import LoopPhase, Move, Region, Schedule, State

GIB = 2**30


def solve(regions: Sequence[Region], phases: Sequence[LoopPhase], *, room_bytes: int) -> Schedule:
    """The schedule with the fewest copied bytes in a step.

    What room that leaves lets copies run beside a phase's work, to the keeper beside the first phase in which the
    region could sleep, back beside the last; where one leaves and another comes at once, both do so beside the phase
    that needs the other. Then it lets regions stay awake that nobody restores.

    Raises:
        ValueError: a phase does not fit although everything sleeps that it does not use; says what would help.
    """
    _check_fit(regions, phases, room_bytes=room_bytes)
    step = tuple(phase for phase in phases if phase.in_every_step)
    gaps = [gap for region in regions for gap in gaps_of(region, step)]
    free_of_charge = [gap for gap in gaps if not (gap.region.leave_bytes or gap.return_bytes)]
    sleeps = _Search(gaps, regions, step, free_of_charge=free_of_charge, room_bytes=room_bytes).cheapest()
    if sleeps is None:
        _check_fit(regions, phases, room_bytes=room_bytes, rebuilds=True)
        raise AssertionError("every phase fits while everything else sleeps, so there is a schedule")
    table = _Table(regions, step, [*sleeps, *(_Sleep(gap, gap.phases) for gap in free_of_charge)], room_bytes)
    moves = table.place(_copies(sleeps, step, table.states))
    table.let_stay(free_of_charge)
    return Schedule(
        room_bytes=room_bytes,
        regions=tuple(regions),
        phases=step,
        occasional=tuple(phase for phase in phases if not phase.in_every_step),
        states={name: tuple(row) for name, row in table.states.items()},
        moves=tuple(moves),
    )


def _check_fit(
    regions: Sequence[Region], phases: Sequence[LoopPhase], *, room_bytes: int, rebuilds: bool = False
) -> None:
    """``rebuilds``: count the copies from which regions are rebuilt, too."""
    of_name = {region.name: region for region in regions}

    def beside_bytes(phase: LoopPhase) -> int:
        own = phase.uses - phase.replaces
        rebuilt = [of_name[name] for name in own if rebuilds and of_name[name].rebuilt_from not in phase.uses]
        return max([phase.reserve_bytes, *(region.rebuild_bytes for region in rebuilt)])

    def needed_bytes(phase: LoopPhase) -> int:
        return sum(of_name[name].size_bytes for name in phase.uses) + beside_bytes(phase)

    phase = max(phases, key=needed_bytes)
    needed = needed_bytes(phase)
    if needed <= room_bytes:
        return
    used = sorted((of_name[name] for name in phase.uses), key=lambda region: (-region.size_bytes, region.name))
    parts = [f"{region.name} {region.size_bytes / GIB:.2f}" for region in used]
    raise ValueError(
        f"the phase {phase.name} needs {needed / GIB:.2f} GiB of GPU memory per rank ({', '.join(parts)}, activations "
        f"and the like {beside_bytes(phase) / GIB:.2f}), and there are {room_bytes / GIB:.2f}: "
        f"{(needed - room_bytes) / GIB:.2f} GiB are missing although everything else sleeps. Use more ranks "
        "(launch.nproc, parallel.tp, parallel.pp, parallel.cp), smaller micro-batches (algo.micro_batch_size, "
        "algo.micro_batch_tokens), training.recompute=full or a smaller model, or raise launch.gpu_memory_gib if the "
        "GPU has more"
    )


@dataclass(frozen=True)
class _Sleep:
    """A region asleep in ``phases``, some or all of a gap; in none of them where it is only restored."""

    gap: Gap
    phases: tuple[int, ...]

    @property
    def leaves_at(self) -> int:
        return self.phases[0] if self.phases else self.gap.last_use


@dataclass(frozen=True)
class _Copy:
    """Of a region to its keeper before it sleeps, or back afterwards."""

    sleep: _Sleep
    to_host: bool
    size_bytes: int


class _Search:
    """Decides one gap after the other, first those of regions from which others are rebuilt."""

    def __init__(
        self,
        gaps: Sequence[Gap],
        regions: Sequence[Region],
        step: Sequence[LoopPhase],
        *,
        free_of_charge: Sequence[Gap],
        room_bytes: int,
    ) -> None:
        charged = [gap for gap in gaps if gap not in free_of_charge]
        rebuilds = {(gap.region.rebuilt_from, gap.next_use) for gap in gaps}
        self._gaps = sorted(charged, key=lambda gap: (gap.region.rebuilt_from is not None, -gap.region.size_bytes))
        self._choices = [
            gap.parts({use for source, use in rebuilds if source == gap.region.name}) for gap in self._gaps
        ]
        size = {region.name: region.size_bytes for region in regions}
        self._reserve = [phase.reserve_bytes for phase in step]
        self._free = [room_bytes - phase.reserve_bytes - sum(size[name] for name in phase.uses) for phase in step]
        self._least_cost = [self._least_copied_bytes(gap) for gap in self._gaps]
        covering = [[n for n, gap in enumerate(self._gaps) if position in gap.phases] for position in range(len(step))]
        self._cheapest_first = [
            sorted(numbers, key=lambda n: self._least_cost[n] / self._gaps[n].region.size_bytes) for numbers in covering
        ]
        self._best_cost: int | None = None
        self._best: list[_Sleep] | None = None

    def cheapest(self) -> list[_Sleep] | None:
        """The sleeps of the best schedule; None if nothing fits."""
        self._decide([], decided=0, cost=0, free=self._free, reserve=self._reserve)
        return self._best

    def _least_copied_bytes(self, gap: Gap) -> int:
        together = [other for other in self._gaps if (other.region, other.last_change) == (gap.region, gap.last_change)]
        returned = gap.return_bytes if gap.region.rebuilt_from is None else 0
        return gap.leave_bytes(is_first=len(together) == 1) + returned

    def _decide(self, sleeps: list[_Sleep], *, decided: int, cost: int, free: list[int], reserve: list[int]) -> None:
        """Try every choice for the gaps from ``decided`` on. ``cost``: bytes that ``sleeps`` copy; ``free``: bytes that
        a phase's reserve and the regions decided to be awake leave."""
        bound = self._bound(decided, free)
        if bound is None or (self._best_cost is not None and cost + bound >= self._best_cost):
            return
        if decided == len(self._gaps):
            self._best_cost, self._best = cost, sleeps
            return
        gap = self._gaps[decided]
        for asleep in ((), *self._choices[decided]):
            left, then_reserved, copied, then_sleeps = list(free), list(reserve), 0, sleeps
            for position in gap.phases:
                left[position] -= gap.region.size_bytes if position not in asleep else 0
            if asleep or gap.is_restored:
                copied, beside = self._copied_bytes(gap, sleeps)
                then_reserved[gap.next_use] = max(reserve[gap.next_use], beside)
                left[gap.next_use] -= then_reserved[gap.next_use] - reserve[gap.next_use]
                then_sleeps = [*sleeps, _Sleep(gap, asleep)]
            self._decide(then_sleeps, decided=decided + 1, cost=cost + copied, free=left, reserve=then_reserved)

    def _copied_bytes(self, gap: Gap, sleeps: Sequence[_Sleep]) -> tuple[int, int]:
        """(bytes that a sleep in ``gap`` copies after ``sleeps``, device memory that its return takes for a moment)."""
        together = [s.gap for s in sleeps if (s.gap.region, s.gap.last_change) == (gap.region, gap.last_change)]
        left, source = gap.leave_bytes(is_first=not together), gap.region.rebuilt_from
        if source is None or any(s.gap.region.name == source and gap.next_use in s.phases for s in sleeps):
            return left + gap.return_bytes, gap.rebuild_bytes
        return left, 0

    def _bound(self, decided: int, free: Sequence[int]) -> int | None:
        """What the gaps from ``decided`` on cost at least; None if not even sleeping in all of them makes room."""
        bound = 0
        for position, left in enumerate(free):
            undecided = [number for number in self._cheapest_first[position] if number >= decided]
            excess = sum(self._gaps[number].region.size_bytes for number in undecided) - left
            cost = 0
            for number in undecided:
                if excess <= 0:
                    break
                size = self._gaps[number].region.size_bytes
                cost += self._least_cost[number] * min(excess, size) // size
                excess -= size
            if excess > 0:
                return None
            bound = max(bound, cost)
        return bound


def _copies(sleeps: Sequence[_Sleep], step: Sequence[LoopPhase], states: Mapping[str, list[State]]) -> list[_Copy]:
    """The copies of one step."""
    copies = []
    for sleep in sleeps:
        gap, region = sleep.gap, sleep.gap.region
        together = [s for s in sleeps if (s.gap.region, s.gap.last_change) == (region, gap.last_change)]
        since = -1 if gap.last_change is None else gap.last_change
        first = min(together, key=lambda s: (s.leaves_at - since - 1) % len(step))
        copies.append(_Copy(sleep, True, gap.leave_bytes(is_first=sleep is first)))
        source = region.rebuilt_from
        is_rebuilt = source is not None and states[source][gap.next_use] is not State.ASLEEP
        copies.append(_Copy(sleep, False, 0 if is_rebuilt else gap.return_bytes))
    return [copy for copy in copies if copy.size_bytes]


class _Table:
    """The states of all regions in all phases, and the room that each phase has left."""

    def __init__(
        self, regions: Sequence[Region], step: Sequence[LoopPhase], sleeps: Sequence[_Sleep], room_bytes: int
    ) -> None:
        self._regions, self._step, self._room_bytes = regions, step, room_bytes
        self._reserve = [phase.reserve_bytes for phase in step]
        self.states: dict[str, list[State]] = {}
        for region in regions:
            is_used = any(region.name in phase.uses for phase in step)
            otherwise = State.STAYS if is_used else State.ASLEEP
            self.states[region.name] = [State.USED if region.name in phase.uses else otherwise for phase in step]
        for sleep in sleeps:
            for position in sleep.phases:
                self.states[sleep.gap.region.name][position] = State.ASLEEP

    def _fits(self, region: Region, position: int) -> bool:
        """Whether there is room for a region more in a phase."""
        awake = sum(r.size_bytes for r in self._regions if self.states[r.name][position] is not State.ASLEEP)
        return awake + region.size_bytes + self._reserve[position] <= self._room_bytes

    def place(self, copies: Sequence[_Copy]) -> list[Move]:
        """Every copy beside a phase that has room for it, or at a boundary; the largest choose first."""
        for copy in copies:
            if not copy.to_host:
                use = copy.sleep.gap.next_use
                self._reserve[use] = max(self._reserve[use], copy.sleep.gap.rebuild_bytes)
        moves = []
        for copy in sorted(copies, key=lambda copy: -copy.size_bytes):
            region, phases = copy.sleep.gap.region, copy.sleep.phases
            states, before_use = self.states[region.name], (copy.sleep.gap.next_use - 1) % len(self._step)
            at = copy.sleep.leaves_at if copy.to_host else (before_use, *phases)[-1]
            is_longer = any(states[position] is State.ASLEEP for position in phases if position != at)
            may_run_beside = region.copies_beside_work and (copy.to_host or not copy.sleep.gap.is_restored)
            beside = may_run_beside and is_longer and self._fits(region, at)
            if beside:
                states[at] = State.GOES if copy.to_host else State.COMES
            elif not copy.to_host:
                at = (at + 1) % len(self._step)
            moves.append((at, Move(region.name, self._step[at].name, copy.to_host, copy.size_bytes, beside)))
        return self._swapped([move for _, move in sorted(moves, key=lambda item: item[0])])

    def _swapped(self, moves: Sequence[Move]) -> list[Move]:
        """Copies both ways at one boundary, of regions whose copies can run beside work, run beside the phase after
        it."""
        able = {region.name for region in self._regions if region.copies_beside_work}
        at_boundary = [move for move in moves if move.region in able and not move.beside]
        both = {m.phase for m in at_boundary if m.to_host} & {m.phase for m in at_boundary if not m.to_host}
        swap = [move for move in at_boundary if move.phase in both]
        return [replace(move, beside=True, swaps=True) if move in swap else move for move in moves]

    def let_stay(self, gaps: Sequence[Gap]) -> None:
        """Leave regions awake through those of ``gaps`` that have room, the largest first."""
        for gap in sorted(gaps, key=lambda gap: -gap.region.size_bytes):
            if all(self._fits(gap.region, position) for position in gap.phases):
                for position in gap.phases:
                    self.states[gap.region.name][position] = State.STAYS
