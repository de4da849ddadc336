"""The schedule of a run's step (``offload=auto``), and which weights tags have a copy in GPU memory.

Every choice of resident tags is tried, each with the best schedule that it leaves room for: the one that moves the
fewest bytes in all, and of those the one that takes the least GPU memory.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from itertools import combinations

from trainer.config.schema import Config
from trainer.plan.holdings import EngineBytes
from trainer.plan.schedule import Schedule
from trainer.plan.scheduler import solve
from trainer.plan.step_phases import StepPhases

GIB = 2**30
NO_LIMIT = 2**62


def room_bytes(config: Config, reported: int | None) -> int:
    """GPU memory of a rank: ``launch.gpu_memory_gib``, or what the card reports; on the CPU as much as there may be."""
    limit = config.launch.gpu_memory_gib
    if limit is not None:
        return int(limit * GIB)
    return NO_LIMIT if reported is None else reported


def make_schedule(
    config: Config,
    *,
    vocab_size: int,
    engine: EngineBytes,
    room: int,
    stage: int = 0,
    reserves: Mapping[str, int] | None = None,
) -> Schedule | None:
    """The schedule of a rank of a pipeline stage; None under ``offload=train``, where everything sleeps that is not at
    work. Under ``offload=none`` everything is awake, and only tags may lie elsewhere.

    Args:
        room: GPU memory in bytes; see :func:`room_bytes`.
        reserves: phase -> bytes that no region holds, where they are measured.

    Raises:
        ValueError: a phase does not fit although everything else sleeps (``offload=auto``).
    """
    if config.offload.train and not config.offload.auto:
        return None
    step = StepPhases.of(config, vocab_size=vocab_size, engine=engine, stage=stage, reserves=reserves or {})
    best, refused = None, None
    for resident in _subsets(step.switched_tags):
        try:
            found = _solve(step, resident, room=room, all_awake=not config.offload.train)
        except ValueError as error:
            refused = refused or error
            continue
        if best is None or found.cost_bytes < best.cost_bytes:
            best = found
    if best is None and config.offload.train:
        assert refused is not None
        raise refused
    return best


def _subsets(tags: Collection[str]) -> Iterator[frozenset[str]]:
    """The smallest first."""
    for size in range(len(tags) + 1):
        yield from map(frozenset, combinations(tags, size))


def _solve(step: StepPhases, resident: frozenset[str], *, room: int, all_awake: bool) -> Schedule:
    regions, phases = step.regions(resident), step.phases(resident)
    if all_awake:
        uses = frozenset(region.name for region in regions) - _absent(step, resident)
        phases = [replace(phase, uses=uses) for phase in phases]
    schedule = solve(regions, phases, room_bytes=room)
    order = [phase.name for phase in schedule.phases]
    moves = sorted([*schedule.moves, *step.switches(resident)], key=lambda move: order.index(move.phase))
    return replace(schedule, moves=tuple(moves), resident_tags=resident)


def _absent(step: StepPhases, resident: Collection[str]) -> frozenset[str]:
    return frozenset(f"actor/weights/{tag}" for tag in step.switched_tags if tag not in resident)
