"""The case ``swap``: the GPU is handed from one role to the other and back, with room for one of them alone.

Both train in turn by a schedule of two phases, as under ``offload=auto``. A hand-over is measured from the end of the
one's work until the other has all that its optimizer step needs; in a run its passes hide most of that.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

from trainer.bench.cases import CaseJob
from trainer.bench.measure import (
    ROLES,
    build_roles,
    pretend_to_have_trained,
    set_up,
    state_checksums,
    step_on_noise,
    timed,
    true_on_all_ranks,
    versions,
)
from trainer.megatron import platform
from trainer.megatron.groups import pipeline_rank
from trainer.plan.holdings import EngineBytes
from trainer.plan.schedule import Schedule
from trainer.plan.scheduler import solve
from trainer.plan.step_phases import StepPhases

if TYPE_CHECKING:
    from trainer.roles.role import Role

Result = TypeVar("Result")


def schedule_of_two(job: CaseJob) -> Schedule:
    """Of a step in which critic and actor train in turn, each of them alone on the device."""
    no_engine = EngineBytes((), has_own_weights=False)
    step = StepPhases.of(
        job.config, vocab_size=job.bench.vocab_size, engine=no_engine, stage=pipeline_rank(), reserves={}
    )
    phases = [phase for phase in step.phases(()) if phase.name in ("train_critic", "train_actor")]
    phases = [replace(phase, restores=frozenset(), reserve_bytes=0) for phase in phases]
    regions = [region for region in step.regions(()) if any(region.name in phase.uses for phase in phases)]
    room = max(sum(r.size_bytes for r in regions if r.name in phase.uses) for phase in phases)
    return solve(regions, phases, room_bytes=room)


def run_swap(job: CaseJob) -> dict[str, Any]:
    """Hand the device over ``bench.cycles`` times each way -> seconds, bytes both ways, whether all bits were kept."""
    set_up(job)
    events: list[dict[str, Any]] = []
    build_seconds, built = timed(lambda: build_roles(job, events, schedule=schedule_of_two(job)))
    roles: dict[str, Role] = {role.name: role for role in built}  # type: ignore[misc]  # a case without a peer
    turns = roles["actor"].regions.turns

    def take_over(name: str) -> None:
        turns.begin(f"train_{name}")
        roles[name].wake_up()
        roles[name].regions.wait_for_optimizer_state()

    def work(name: str, action: Callable[[Role], Result]) -> Result:
        result = action(roles[name])
        turns.done(roles[name])
        turns.end(f"train_{name}")
        return result

    before = {}
    for name in ("critic", "actor"):
        take_over(name)
        before[name] = work(name, lambda role: (step_on_noise(role, seed=job.config.seed), state_checksums(role))[1])
    hand_overs, after = [], {}
    for _ in range(job.bench.cycles):
        for going, coming in (("actor", "critic"), ("critic", "actor")):
            turns.begin(f"train_{going}")
            roles[going].wake_up()
            work(going, pretend_to_have_trained)
            events.clear()
            seconds, _ = timed(lambda name=coming: take_over(name))
            after[coming] = work(coming, state_checksums)
            copied = {key: sum(event[key] for event in events) for key in ("to_host_bytes", "to_device_bytes")}
            hand_overs.append({"from": going, "to": coming, "seconds": seconds, **copied})
    return {
        "platform": platform.describe(job.config),
        "nproc": job.config.launch.nproc,
        "versions": versions(),
        "parameters": {name: roles[name].model.parameter_count() for name in ROLES},
        "build_seconds": build_seconds,
        "hand_overs": hand_overs,
        "bits_kept": true_on_all_ranks(before == after),
    }
