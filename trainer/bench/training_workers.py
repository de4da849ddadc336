"""The workers' side of the training benchmark: PPO steps of this project, and those of the plain loop."""

from __future__ import annotations

import faulthandler
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from trainer import worker
from trainer.bench.measure import versions
from trainer.common import garbage
from trainer.config.schema import Config
from trainer.megatron import platform

if TYPE_CHECKING:
    from trainer.measure.phases import Phases


@dataclass(frozen=True)
class TrainingJob:
    """What the parent hands to the worker of one case.

    Attributes:
        folder: where the weights lie, as a Hugging Face folder, that every case starts from.
    """

    config: Config
    folder: Path
    steps: int
    timeout_seconds: int


def run_torpor(job: TrainingJob) -> dict[str, Any]:
    """PPO steps of :mod:`trainer.loop`; writes the weights that they start from, once."""
    phases = _set_up(job)
    from trainer import loop

    run = worker.build(job.config, phases)
    loop.warm_up(run, loop.Outputs(None, None, None))
    if not job.folder.exists():
        worker.export(run, job.folder)
    schedules, kl_coef = run.build_schedules(), job.config.algo.kl.coef
    return _measure(job, phases, lambda number: loop.ppo_step(run, number, schedules=schedules, kl_coef=kl_coef))


def run_plain(job: TrainingJob) -> dict[str, Any]:
    """PPO steps of :mod:`trainer.bench.plain_loop`."""
    phases = _set_up(job)
    from trainer.bench.plain_loop import PlainLoop

    return _measure(job, phases, PlainLoop(job.config, phases, folder=job.folder).ppo_step)


def run_plain_liger(job: TrainingJob) -> dict[str, Any]:
    """The same with Liger's kernels in the models."""
    phases = _set_up(job)
    from trainer.bench.plain_loop import PlainLoop, use_liger

    return _measure(job, phases, PlainLoop(job.config, phases, folder=job.folder, prepare=use_liger).ppo_step)


def _set_up(job: TrainingJob) -> Phases:
    faulthandler.dump_traceback_later(job.timeout_seconds, exit=True)
    platform.set_up(job.config)
    platform.set_up_process_groups(job.config)
    from trainer.measure.phases import Phases

    return Phases(lambda record: None, gpu=job.config.platform.name == "cuda")


def _measure(job: TrainingJob, phases: Phases, ppo_step: Callable[[int], Mapping[str, Any]]) -> dict[str, Any]:
    """The metrics of each step, with ``seconds/wall``: all of it, also what happens between phases."""
    is_gpu, records = job.config.platform.name == "cuda", []
    if is_gpu:
        torch.cuda.reset_peak_memory_stats()
    phases.end_step()
    garbage.collect_for_good()
    for number in range(1, job.steps + 1):
        start = time.perf_counter()
        record = dict(ppo_step(number))
        wall_seconds = time.perf_counter() - start
        records.append({**record, **phases.end_step(), "wall_seconds": wall_seconds})
    return {
        "platform": platform.describe(job.config),
        "versions": versions(),
        "steps": records,
        "gpu_peak_allocated_bytes": torch.cuda.max_memory_allocated() if is_gpu else None,
    }
