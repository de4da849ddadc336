"""The workers' side of the benchmark: build both roles, let them sleep and wake up, measure; and the plain copies.

Simplification: rank 0's numbers stand for all. Every time is taken between two synchronisations with the device (and,
with several ranks, after a barrier), around ``sleep()`` and ``wake_up()`` as a user calls them.
"""

from __future__ import annotations

import ctypes
import faulthandler
import gc
import hashlib
import platform as host_platform
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from importlib import metadata
from typing import Any

import psutil
import torch
from torch import distributed

from trainer import platform
from trainer.bench.cases import CaseJob
from trainer.plan import make_plan

ROLES = ("actor", "critic")
_COPY_REPEATS = 5
_DIGEST_THREADS = 8
_DIGEST_PIECE_BYTES = 1 << 26


def run_case(job: CaseJob) -> dict[str, Any]:
    """Sleep and wake ``bench.cycles`` times -> seconds, memory samples, ledger events, whether all bits were kept."""
    _set_up(job)
    events: list[dict[str, Any]] = []
    baseline = sample_memory()
    build_seconds, roles = _timed(lambda: _build(job, events))
    for role in roles:
        _step_on_noise(role, seed=job.config.seed)
    torch.cuda.empty_cache()
    before = [state_sha256(role) for role in roles]
    cycles = []
    for _ in range(job.bench.cycles):
        for role in roles:
            _pretend_to_have_trained(role)
        events.clear()
        sleep_seconds = {role.name: _timed(role.sleep)[0] for role in roles}
        asleep = sample_memory()
        slept = list(events)
        events.clear()
        wake_seconds = {role.name: _timed(role.wake_up)[0] for role in roles}
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
    return {
        "platform": platform.describe(job.config),
        "nproc": job.config.launch.nproc,
        "versions": versions(),
        "parameters": {role.name: role.parameter_count() for role in roles},
        "build_seconds": build_seconds,
        "memory_baseline": baseline,
        "cycles": cycles,
        "bits_kept": _true_on_all_ranks(before == [state_sha256(role) for role in roles]),
    }


def measure_roofline(job: CaseJob) -> dict[str, float]:
    """Bytes per second of one plain copy each way, best of some: what sleep and wake-up could reach.

    On a GPU the host side is an exact-size, page-locked arena and the copy runs on a side stream.
    """
    _set_up(job)
    from trainer.memory.arena import HostArena

    size_bytes = job.bench.roofline_mib << 20
    device = torch.ones(size_bytes, dtype=torch.uint8, device=torch.cuda.current_device())
    arena = HostArena(size_bytes, pinned=job.config.platform.name == "cuda")
    host = arena.empty_like(device)
    arena.wait_until_ready()
    stream = torch.cuda.Stream()

    def copy(target: torch.Tensor, source: torch.Tensor) -> None:
        with torch.cuda.stream(stream):
            target.copy_(source, non_blocking=True)

    copy(host, device)
    rates = {}
    for name, target, source in (("to_host", host, device), ("to_device", device, host)):
        best = min(_timed(lambda t=target, s=source: copy(t, s))[0] for _ in range(_COPY_REPEATS))
        rates[name] = size_bytes / best
    return rates


def _set_up(job: CaseJob) -> None:
    faulthandler.dump_traceback_later(job.bench.case_timeout_seconds, exit=True)
    platform.set_up(job.config)
    platform.set_up_process_groups(job.config)
    import trainer.role  # noqa: F401  (megatron, before the baseline is taken)

    torch.manual_seed(job.config.seed)
    torch.ones(1, device=torch.cuda.current_device()).item()  # the CUDA context belongs to the baseline too


def _build(job: CaseJob, events: list[dict[str, Any]]) -> list[Any]:
    """Both roles, ready for their first sleep: host memory that is pinned at all in advance is pinned."""
    from trainer.bench import peers
    from trainer.distributed import seed_for
    from trainer.memory.saver import make_saver
    from trainer.role import Role

    config = job.config
    plan, saver = make_plan(config), make_saver(config)
    roles = []
    for name in ROLES:
        parts = peers.Parts(
            plan=plan,
            saver=saver,
            vocab_size=job.bench.vocab_size,
            seed=seed_for(config.seed, f"init/{name}"),
            observer=events.append,
            pinned=config.platform.name == "cuda",
        )
        if job.peer is None:
            roles.append(Role(name, config, **vars(parts)))
        else:
            roles.append(getattr(peers, job.peer)(name, config, parts=parts))
    for role in roles:
        role.backup()
    return roles


def _grad_buffers(role: Any) -> Iterator[torch.Tensor]:
    for chunk in role.chunks:
        for buffer in chunk.buffers + chunk.expert_parallel_buffers:
            yield buffer.grad_data


def _step_on_noise(role: Any, *, seed: int) -> None:
    """One real optimizer step on random gradients, after which no moment is zero."""
    torch.manual_seed(seed)
    with role.training():
        for gradients in _grad_buffers(role):
            gradients.normal_()
        updated, _ = role.step()
    assert updated


def _pretend_to_have_trained(role: Any) -> None:
    """A step that is skipped for its infinite gradient norm: nothing changes, but every host copy counts as stale, so
    that the next sleep copies all it would copy after real training."""
    with role.training():
        for gradients in _grad_buffers(role):
            gradients.fill_(torch.inf)
        updated, _ = role.step()
    assert not updated


def _timed(action: Callable[[], Any]) -> tuple[float, Any]:
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


def sample_memory() -> dict[str, int | None]:
    """Bytes in use now: this process's resident and proportional set, the host's, the GPU's (all processes).

    ``pss_bytes`` is taken after malloc has given back the freed blocks that it holds for reuse.
    """
    gc.collect()
    untrimmed = psutil.Process().memory_full_info()
    with suppress(OSError, AttributeError):  # glibc only
        ctypes.CDLL("libc.so.6").malloc_trim(0)
    process, host = psutil.Process().memory_full_info(), psutil.virtual_memory()
    sample: dict[str, int | None] = {
        "rss_bytes": process.rss,
        "pss_bytes": process.pss,
        "pss_untrimmed_bytes": untrimmed.pss,
        "host_used_bytes": host.total - host.available,
        "gpu_used_bytes": None,
        "gpu_reserved_bytes": None,
        "gpu_allocated_bytes": None,
    }
    if torch.cuda.is_available():
        free, total = torch.cuda.mem_get_info()
        sample["gpu_used_bytes"] = total - free
        sample["gpu_reserved_bytes"] = torch.cuda.memory_reserved()
        sample["gpu_allocated_bytes"] = torch.cuda.memory_allocated()
    return sample


def state_sha256(role: Any) -> str:
    """SHA-256 over the SHA-256 of every 64 MiB piece of every model tensor, main param and moment of this rank."""
    from trainer.bench.peers import state_tensors
    from trainer.models.build import named_tensors

    def pieces() -> Iterator[torch.Tensor]:
        for tensor in [*(tensor for _, tensor in named_tensors(role.chunks)), *state_tensors(role.optimizer)]:
            yield from tensor.detach().reshape(-1).view(torch.uint8).split(_DIGEST_PIECE_BYTES)

    def piece_digest(piece: torch.Tensor) -> bytes:
        return hashlib.sha256(piece.cpu().numpy().data).digest()

    with ThreadPoolExecutor(_DIGEST_THREADS) as pool:
        return hashlib.sha256(b"".join(pool.map(piece_digest, pieces()))).hexdigest()


def _true_on_all_ranks(value: bool) -> bool:
    from trainer.distributed import sum_over_ranks

    return sum_over_ranks({"false": float(not value)})["false"] == 0


def versions() -> dict[str, str]:
    """Of Python and of what the times depend on."""
    names = ("torch", "megatron-core", "torch-memory-saver", "transformers")
    return {"python": host_platform.python_version(), **{name: metadata.version(name) for name in names}}
