"""A schedule: which regions of GPU memory sleep in which phase of the step, and what is copied for it.

The phases of a step follow each other, and the next step begins where the last one ended: a region that is awake in the
last phase is so when the first begins. :mod:`trainer.plan.scheduler` finds the schedule that moves the fewest bytes.
Pure: imports neither torch nor megatron.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from enum import Enum


@dataclass(frozen=True, kw_only=True)
class Region:
    """Device memory that sleeps and wakes up as a whole.

    Attributes:
        size_bytes: device memory while awake.
        leave_bytes: copied to its keeper when it falls asleep with changes; 0 if nobody has to restore it.
        return_bytes: copied back when it wakes up.
        leaves_unchanged: it is copied at every sleep (the saver's way), not only at those with changes.
        copies_beside_work: its copies can run while a phase computes.
        rebuilt_from: a region from which this one is rebuilt. Where that region is awake it comes back without a copy,
            elsewhere by a copy of ``return_bytes``, which occupies ``rebuild_bytes`` of the device for a moment.
    """

    name: str
    size_bytes: int
    leave_bytes: int = 0
    return_bytes: int = 0
    leaves_unchanged: bool = False
    copies_beside_work: bool = False
    rebuilt_from: str | None = None
    rebuild_bytes: int = 0


@dataclass(frozen=True, kw_only=True)
class LoopPhase:
    """A phase of the loop and the device memory that it needs.

    Attributes:
        uses: names of the regions that must be awake.
        changes: those of them whose bytes change, so that a copy made earlier is worth nothing any more.
        replaces: those of them that get other bytes for this phase (another tag's weights), whatever they held: to
            wake up for it takes no copy of theirs.
        restores: those of them whose bytes an earlier phase has replaced: they come back even if they are awake.
        reserve_bytes: everything else: activations, KV cache, CUDA context, communicators.
        in_every_step: False for an evaluation or a checkpoint: it has to fit, and its copies are not counted.
    """

    name: str
    uses: frozenset[str]
    changes: frozenset[str] = frozenset()
    replaces: frozenset[str] = frozenset()
    restores: frozenset[str] = frozenset()
    reserve_bytes: int = 0
    in_every_step: bool = True


class State(Enum):
    """What a region does in a phase; all but ``ASLEEP`` hold its device memory."""

    USED = "used"
    STAYS = "stays"  # nobody uses it, and there is room
    GOES = "goes"  # it is copied to its keeper beside the phase and released afterwards
    COMES = "comes"  # it is copied back beside the phase
    ASLEEP = "asleep"


@dataclass(frozen=True)
class Move:
    """One copy of a step: at the boundary before ``phase``, or ``beside`` its work.

    ``swaps``: piece by piece beside the work of ``phase``, to make room for a region whose copy comes at the same time,
    or into the room that another one makes.
    """

    region: str
    phase: str
    to_host: bool
    size_bytes: int
    beside: bool
    swaps: bool = False


@dataclass(frozen=True)
class Schedule:
    """Every region's state in every phase of the step, in order, and the copies of one step.

    Attributes:
        room_bytes: of the device.
        phases: those of the step.
        occasional: those that not every step has.
        states: name of a region -> its state in each of ``phases``.
        resident_tags: weights tags that have their copy in GPU memory.
    """

    room_bytes: int
    regions: tuple[Region, ...]
    phases: tuple[LoopPhase, ...]
    occasional: tuple[LoopPhase, ...]
    states: Mapping[str, tuple[State, ...]]
    moves: tuple[Move, ...]
    resident_tags: frozenset[str] = frozenset()

    @property
    def cost_bytes(self) -> int:
        """Bytes that one step copies, both ways together."""
        return sum(move.size_bytes for move in self.moves)

    def sleeps_ever(self, region: str) -> bool:
        """Whether a region sleeps in any phase of the step."""
        return State.ASLEEP in self.states[region]

    def victims(self, awake: Collection[str], *, needed: Collection[str], beside_bytes: int) -> list[str]:
        """Which of ``awake`` have to sleep so that ``needed`` fit beside ``beside_bytes`` of other memory, in a phase
        that the schedule does not have: those that sleep in a step anyway first, then the cheapest by what they free.
        All that may go, if not even that makes room."""
        of_name = {region.name: region for region in self.regions}
        held = sum(of_name[name].size_bytes for name in {*awake, *needed})
        going: list[str] = []

        def cost(name: str) -> tuple[bool, float, str]:
            region = of_name[name]
            copied = region.leave_bytes + region.return_bytes
            return not self.sleeps_ever(name), copied / region.size_bytes, name

        resident = {name for name in awake if "/weights/" in name}
        for name in sorted(set(awake) - set(needed) - resident, key=cost):
            if held + beside_bytes <= self.room_bytes:
                break
            held -= of_name[name].size_bytes
            going.append(name)
        return going

    def state(self, region: str, phase: str) -> State:
        """Raises ValueError for a phase that is none of the step."""
        return self.states[region][[one.name for one in self.phases].index(phase)]

    def awake(self, phase: str) -> frozenset[str]:
        """The regions that hold device memory in a phase of the step."""
        return frozenset(region.name for region in self.regions if self.state(region.name, phase) is not State.ASLEEP)

    def awake_bytes(self, phase: str) -> int:
        """Device memory that the regions hold in a phase of the step."""
        awake = self.awake(phase)
        return sum(region.size_bytes for region in self.regions if region.name in awake)

    def moved_bytes(self, *, to_host: bool) -> int:
        """Bytes that one step copies in one direction."""
        return sum(move.size_bytes for move in self.moves if move.to_host == to_host)
