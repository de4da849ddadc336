"""Gaps: the phases between two uses of a region, in which it can sleep."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from trainer.plan.schedule import LoopPhase, Region


@dataclass(frozen=True)
class Gap:
    """Phases (positions in the step, in the loop's order) between two uses of a region.

    ``last_use``, ``next_use``: the phases around them. ``last_change``: the last use before them that changes the
    region, None if none ever does. The gaps between two changes need one copy to the keeper among them.
    ``is_replaced``: the next use brings other bytes anyway. ``is_restored``: the next use brings the region's bytes
    back anyway; then there may be no phases between the two.
    """

    region: Region
    phases: tuple[int, ...]
    last_use: int
    next_use: int
    last_change: int | None
    is_replaced: bool
    is_restored: bool

    @property
    def return_bytes(self) -> int:
        return 0 if self.is_replaced else self.region.return_bytes

    @property
    def rebuild_bytes(self) -> int:
        return 0 if self.is_replaced else self.region.rebuild_bytes

    def leave_bytes(self, *, is_first: bool) -> int:
        """Copied to the keeper for a sleep in the gap, the first or a later one since the region's last change."""
        is_copied = self.region.leaves_unchanged or (self.last_change is not None and is_first)
        return self.region.leave_bytes if is_copied else 0

    def parts(self, needed_at: Collection[int]) -> tuple[tuple[int, ...], ...]:
        """The whole gap, and its longest stretches before and after phases of ``needed_at``, in which the region would
        be worth something."""
        cuts = [place for place, position in enumerate(self.phases) if position in needed_at]
        starts, ends = [0, *(cut + 1 for cut in cuts)], [len(self.phases), *cuts]
        return tuple(self.phases[start:end] for start in starts for end in ends if start < end)


def gaps_of(region: Region, step: Sequence[LoopPhase]) -> Iterator[Gap]:
    uses = [position for position, phase in enumerate(step) if region.name in phase.uses]
    changes = [position for position in uses if region.name in step[position].changes]
    for use, next_use in zip(uses, uses[1:] + uses[:1], strict=True):
        length, is_restored = (next_use - use - 1) % len(step), region.name in step[next_use].restores
        if length or is_restored:
            last_change = max((change for change in changes if change <= use), default=max(changes, default=None))
            phases = tuple((use + 1 + n) % len(step) for n in range(length))
            is_replaced = region.name in step[next_use].replaces
            yield Gap(region, phases, use, next_use, last_change, is_replaced, is_restored)
