"""Launch a job, again from its newest checkpoint when a worker fails, and end it as SIGTERM asks."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from trainer.checkpoint import folder as checkpoints
from trainer.checkpoint.preemption import STOP_FILE
from trainer.command import jobs
from trainer.command.launch import WorkerError, launch
from trainer.command.launch_environment import worker_environment
from trainer.command.nodes import Nodes
from trainer.common.terminal import tell
from trainer.config.schema import Config
from trainer.data.selection import Selection
from trainer.worker import Job, run

_ENDED_BY_SIGTERM = 128 + signal.SIGTERM


def launch_attempts(
    config: Config,
    directory: Path,
    *,
    checkpoint: Path | None,
    selection: Selection,
    nodes: Nodes,
    say: Callable[[str], None],
) -> dict[str, Any]:
    """The last record of the job that goes on from ``checkpoint``, after at most ``launch.max_restarts`` restarts.

    On node 0 a restart goes on from the newest checkpoint that the job has saved since it began; the workers of all
    nodes follow node 0.

    Raises:
        WorkerError: a worker failed, and no restart is left.
        SystemExit: a signal ended the job. After SIGTERM (143) its checkpoint is saved, if the job saves any.
    """
    stop_file = None if config.checkpoint.every_steps is None else directory / STOP_FILE
    if stop_file is not None and nodes.rank == 0:
        stop_file.unlink(missing_ok=True)  # of an earlier command that was killed before it could end
    known = checkpoints.latest(directory)
    for restart in range(config.launch.max_restarts + 1):
        if restart:
            where = "where node 0 does"
            if nodes.rank == 0:
                newest = checkpoints.latest(directory)
                checkpoint = checkpoint if newest == known else newest
                jobs.claim(directory, config, checkpoint)
                where = "the beginning"
                if checkpoint is not None:
                    manifest = checkpoints.read(checkpoint, checksums=config.checkpoint.checksums)
                    where = f"step {manifest.step + 1}"
            say(f"restart {restart} of {config.launch.max_restarts}: goes on from {where}")
        try:
            job = Job(config, directory, resume_from=checkpoint, selection=selection)
            record = _launch(job, nodes=nodes.at_restart(restart), stop_file=stop_file)
        except WorkerError as error:
            if restart == config.launch.max_restarts or (stop_file is not None and stop_file.exists()):
                raise
            tell(f"error: {error}")
        except SystemExit as end:
            if not isinstance(end.code, int) or end.code <= 128:  # submitit's, which has queued the job again
                raise
            _end(directory, _farewell(end.code, saves=stop_file is not None), code=end.code)
        else:
            if record["step"] < config.algo.num_steps:
                _end(directory, _stopped_after(record["step"], directory), code=_ENDED_BY_SIGTERM)
            return record
    raise AssertionError("the last attempt returns or raises")


def exit_if_asked(directory: Path) -> None:
    """Exit as after SIGTERM if that came too late to stop this job: no other job of the process shall begin."""
    if (directory / STOP_FILE).exists():
        (directory / STOP_FILE).unlink()
        tell("SIGTERM: the job had finished")
        sys.exit(_ENDED_BY_SIGTERM)


def _launch(job: Job, *, nodes: Nodes, stop_file: Path | None) -> dict[str, Any]:
    settings = job.config.launch
    environment = worker_environment(
        platform=job.config.platform.name,
        sleeps=job.config.offload.train,
        threads_per_worker=settings.threads_per_worker,
    )
    return launch(
        run,
        job,
        nproc=settings.nproc,
        log_dir=job.directory / "logs",
        environment=environment,
        nodes=nodes,
        stop_file=stop_file,
    )


def _stopped_after(step: int, directory: Path) -> str:
    latest = checkpoints.latest(directory)
    if latest is not None and latest.name == f"step_{step}":
        return f"SIGTERM: saved a checkpoint after step {step}; the same command goes on from there"
    return f"SIGTERM: ended after step {step}, which could not be saved; the same command goes on from {latest}"


def _farewell(code: int, *, saves: bool) -> str:
    name = signal.Signals(code - 128).name
    if saves:
        return f"{name}: ended at once; the same command goes on from the last checkpoint, if one was saved"
    return f"{name}: ended at once, and nothing is saved (checkpoint.every_steps=<number> saves checkpoints)"


def _end(directory: Path, message: str, *, code: int) -> None:
    (directory / STOP_FILE).unlink(missing_ok=True)
    jobs.write_failure(directory, message)
    tell(message)
    raise SystemExit(code)
