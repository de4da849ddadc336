"""The workers' side of the benchmark: build both roles, let them sleep and wake up, measure; and the plain copies.

Simplification: rank 0's numbers stand for all. Every time is taken between two synchronisations with the device (and,
with several ranks, after a barrier), around ``sleep()`` and ``wake_up()`` as a user calls them.
"""

from __future__ import annotations

import faulthandler
import platform as host_platform
import time
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import distributed

from trainer.bench.cases import CaseJob
from trainer.bench.plain_disk import plain_disk_rates
from trainer.megatron import platform
from trainer.megatron.groups import pipeline_rank
from trainer.memory.ledger import sample_memory
from trainer.plan import make_plan
from trainer.plan.holdings import arena_bytes
from trainer.plan.schedule import Schedule

if TYPE_CHECKING:
    from trainer.bench.peers import BenchRole

Result = TypeVar("Result")

ROLES = ("actor", "critic")
_COPY_REPEATS = 5
_CHECKSUM_PIECE_WORDS = 1 << 25


def run_case(job: CaseJob) -> dict[str, Any]:
    """Sleep and wake ``bench.cycles`` times -> seconds, memory samples, ledger events, whether all bits were kept."""
    set_up(job)
    events: list[dict[str, Any]] = []
    baseline = sample_memory()
    build_seconds, roles = timed(lambda: build_roles(job, events))
    for role in roles:
        step_on_noise(role, seed=job.config.seed)
    torch.cuda.empty_cache()
    before = [state_checksums(role) for role in roles]
    cycles = []
    for _ in range(job.bench.cycles):
        for role in roles:
            pretend_to_have_trained(role)
        events.clear()
        sleep_seconds = {role.name: timed(role.sleep)[0] for role in roles}
        asleep = sample_memory()
        slept = list(events)
        events.clear()
        wake_seconds = {role.name: timed(role.wake_up)[0] for role in roles}
        cycles.append(
            {
                "sleep_seconds": sleep_seconds,
                "wake_seconds": wake_seconds,
                "memory_asleep": asleep,
                "memory_awake": sample_memory(),
                "sleep_events": slept,
                "wake_events": list(events),
            }
        )
    last = cycles[-1]["sleep_events"]
    copied = sum(event.get("to_host_bytes", 0) for event in last)
    folder = job.config.memory.disk.path if any(event.get("keeper") == "disk" for event in last) else None
    return {
        "platform": platform.describe(job.config),
        "nproc": job.config.launch.nproc,
        "versions": versions(),
        **({} if folder is None else {"disk_bytes": copied, "roofline": plain_disk_rates(Path(folder), copied)}),
        "parameters": {role.name: role.model.parameter_count() for role in roles},
        "build_seconds": build_seconds,
        "memory_baseline": baseline,
        "cycles": cycles,
        "bits_kept": true_on_all_ranks(before == [state_checksums(role) for role in roles]),
    }


def measure_roofline(job: CaseJob) -> dict[str, float]:
    """Bytes per second of one plain copy each way, and of both at once in sum, best of some: what sleep and wake-up
    could reach.

    On a GPU the host side is an exact-size, page-locked arena and the copy runs on a side stream. The first worker of a
    benchmark runs this: it imports what the others import, so that none of their builds reads those files from disk.
    """
    set_up(job)
    import trainer.bench.peers
    import trainer.roles.role  # noqa: F401
    from trainer.memory.arena import HostArena

    size_bytes = job.bench.roofline_mib << 20
    pairs = []
    for _ in range(2):
        device = torch.ones(size_bytes, dtype=torch.uint8, device=torch.cuda.current_device())
        arena = HostArena(size_bytes, pinned=job.config.platform.name == "cuda")
        pairs.append((arena.empty_like(device), device, torch.cuda.Stream()))
        arena.wait_until_ready()
    (host, device, stream), (other_host, other_device, other_stream) = pairs

    def copy(target: torch.Tensor, source: torch.Tensor, stream: torch.cuda.Stream) -> None:
        with torch.cuda.stream(stream):
            target.copy_(source, non_blocking=True)

    copies = {
        "to_host": [(host, device, stream)],
        "to_device": [(other_device, other_host, other_stream)],
        "both_at_once": [(host, device, stream), (other_device, other_host, other_stream)],
    }
    copy(host, device, stream)
    copy(other_host, other_device, stream)
    rates = {}
    for name, several in copies.items():
        best = min(timed(lambda s=several: [copy(*one) for one in s])[0] for _ in range(_COPY_REPEATS))
        rates[name] = len(several) * size_bytes / best
    return rates


def set_up(job: CaseJob) -> None:
    faulthandler.dump_traceback_later(job.bench.case_timeout_seconds, exit=True)
    platform.set_up(job.config)
    platform.set_up_process_groups(job.config)
    torch.manual_seed(job.config.seed)
    torch.ones(1, device=torch.cuda.current_device()).item()  # the CUDA context belongs to the baseline too


def build_roles(job: CaseJob, events: list[dict[str, Any]], *, schedule: Schedule | None = None) -> list[BenchRole]:
    """Both roles, ready for their first sleep: host memory that is pinned at all in advance is pinned, in the
    background while the rest of megatron-core is imported and the models are built. With a schedule they follow it
    from the start."""
    from trainer.common.seeds import seed_for
    from trainer.memory.arena import HostArenas

    config = job.config
    arenas = HostArenas.of(config)
    if job.peer is None:
        sizes = arena_bytes(config, vocab_size=job.bench.vocab_size, stage=pipeline_rank())
        arenas.reserve({owner: size for owner, size in sizes.items() if owner != "weights/ref"})  # nothing makes it

    from trainer.bench import peers
    from trainer.memory.saver import follow, make_saver
    from trainer.roles.role import Role

    plan, saver = make_plan(config), make_saver(config)
    follow(saver, schedule, replan=lambda _: schedule, corrects=False, note=print, ranks=config.world_size)
    roles = []
    for name in ROLES:
        saver.turns.before_building(name)
        parts = peers.Parts(
            plan=plan,
            saver=saver,
            vocab_size=job.bench.vocab_size,
            seed=seed_for(config.seed, f"init/{name}"),
            observer=events.append,
            arenas=arenas,
        )
        if job.peer is None:
            roles.append(Role(name, config, **vars(parts)))
            roles[-1].prepare_sleep()
        else:
            roles.append(getattr(peers, job.peer)(name, config, parts=parts))
    return roles


def step_on_noise(role: BenchRole, *, seed: int) -> None:
    """One real optimizer step on random gradients, after which no moment is zero."""
    torch.manual_seed(seed)
    with role.training():
        for gradients in role.model.grad_buffers():
            gradients.normal_()
        updated, _ = role.step()
    assert updated


def pretend_to_have_trained(role: BenchRole) -> None:
    """A step that is skipped for its infinite gradient norm: nothing changes, but every host copy counts as stale, so
    that the next sleep copies all it would copy after real training."""
    with role.training():
        for gradients in role.model.grad_buffers():
            gradients.fill_(torch.inf)
        updated, _ = role.step()
    assert not updated


def timed(action: Callable[[], Result]) -> tuple[float, Result]:
    """(seconds, result) of ``action``, the device's part included."""
    _synchronize()
    start = time.perf_counter()
    result = action()
    torch.cuda.synchronize()
    return time.perf_counter() - start, result


def _synchronize() -> None:
    torch.cuda.synchronize()
    if distributed.get_world_size() > 1:
        distributed.barrier()


def state_checksums(role: BenchRole) -> list[int]:
    """One checksum per 64 MiB piece of every model tensor, main param and moment of this rank, computed where the
    tensor lies: the sum of its 16-bit words, each times its odd position, modulo 2^64. A change of any single word, or
    a swap of two different ones, changes it."""
    torch.cuda.synchronize()  # the optimizer state may be on its way back
    tensors = [*role.model.tensors().values(), *role.model.optimizer_tensors()]
    words = [tensor.detach().reshape(-1).view(torch.int16) for tensor in tensors]
    pieces = [piece for tensor in words for piece in tensor.split(_CHECKSUM_PIECE_WORDS)]
    positions = 2 * torch.arange(_CHECKSUM_PIECE_WORDS, device=torch.cuda.current_device()) + 1
    return [int((piece * positions[: len(piece)].to(piece.device)).sum()) for piece in pieces]


def true_on_all_ranks(value: bool) -> bool:
    from trainer.megatron.groups import sum_over_ranks

    return sum_over_ranks({"false": float(not value)})["false"] == 0


def versions() -> dict[str, str]:
    """Of Python and of what the times depend on."""
    names = ("torch", "megatron-core", "torch-memory-saver", "transformers")
    return {"python": host_platform.python_version(), **{name: metadata.version(name) for name in names}}
