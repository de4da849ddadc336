"""How a benchmark runs: as a Hydra job, and each case in fresh workers, whose failure is shown and does not end the
others."""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol, TypeVar

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from rich.console import Console

from trainer.bench import cases
from trainer.command import exits
from trainer.command.launch import WorkerError, launch
from trainer.command.launch_environment import worker_environment
from trainer.common.terminal import new_console, tell
from trainer.config import compose as configuration
from trainer.config.hints import hint_for
from trainer.config.schema import Config

_Prepared = TypeVar("_Prepared")


def run_job(prepare: Callable[[list[str]], _Prepared], run: Callable[[_Prepared, Path, Console], bool]) -> None:
    """A Hydra job: ``run`` what ``prepare`` makes of the command's overrides, in the job's directory.

    Exits with 2 and one line if ``prepare`` refuses them, and with 1 if ``run`` says that something failed.
    """
    settings = HydraConfig.get()
    directory, overrides = Path(settings.runtime.output_dir).absolute(), list(settings.overrides.task)
    os.chdir(settings.runtime.cwd)
    try:
        prepared = prepare(overrides)
    except (ValueError, OmegaConfBaseException) as error:
        hint = hint_for(error)
        tell(f"error: {error}" + (f"\nhint: {hint}" if hint else ""))
        raise exits.Said(exits.REFUSED) from error
    if not run(prepared, directory, new_console(width=None if sys.stdout.isatty() else 240)):
        raise exits.Said(exits.FAILED)


def config_of(composed: DictConfig) -> Config:
    """The validated config without the section ``bench``."""
    keys = [field.name for field in dataclasses.fields(Config)]
    return configuration.to_config(OmegaConf.masked_copy(composed, keys))


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
            console.print(path.read_text(), highlight=False, soft_wrap=True)
        console.print(f"{name} failed: {error}", soft_wrap=True)
        return {"error": str(error)}
