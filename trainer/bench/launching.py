"""How a benchmark runs one case: fresh workers, whose failure is shown and does not end the others."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

from rich.console import Console

from trainer.bench import cases
from trainer.config import Config
from trainer.launch import WorkerError, launch
from trainer.launch_environment import worker_environment


class HasConfig(Protocol):
    """What the parent hands to the workers of one case."""

    @property
    def config(self) -> Config: ...


def run_workers(worker: Any, job: HasConfig, name: str, directory: Path, console: Console) -> dict[str, Any]:
    """What rank 0 returned, or {"error": ...} after showing the tracebacks."""
    config, log_dir = job.config, cases.log_dir(directory, name)
    try:
        environment = worker_environment(
            platform=config.platform.name,
            sleeps=config.offload.train,
            threads_per_worker=config.launch.threads_per_worker,
        )
        return launch(worker, job, nproc=config.launch.nproc, log_dir=log_dir, environment=environment)
    except (WorkerError, ValueError) as error:
        for path in sorted(log_dir.glob("*.traceback")):
            console.print(path.read_text(), markup=False, highlight=False, soft_wrap=True)
        console.print(f"{name} failed: {error}", markup=False, soft_wrap=True)
        return {"error": str(error)}
