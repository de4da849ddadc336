"""``python -m trainer``: compose the config, check it, plan, launch the workers, show the result.

This process composes and waits; it never imports megatron nor touches a GPU, so every job of a sweep starts clean.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException
from rich.console import Console

from trainer import config as configuration
from trainer.config import Config
from trainer.hints import hint_for, hint_for_flags
from trainer.launch import WorkerError, launch
from trainer.launch_environment import worker_environment
from trainer.report import MEMORY_FILE, METRICS_FILE, final_tables, plan_table, read_records
from trainer.worker import Job, plan_rows, run

CONFIG_FILE = "config.json"


class JobError(RuntimeError):
    """A job of a sweep failed; one string, so that every launcher can pickle it."""


def run_job(config: Config, directory: Path, console: Console) -> float | None:
    """Launch one validated job and return its objective, the held-out accuracy at the end."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / CONFIG_FILE).write_text(json.dumps(configuration.to_plain(config), indent=2) + "\n")
    platform = "cpu (stand-in for CUDA)" if config.platform.name == "cpu" else config.platform.name
    console.print(
        f"platform: {platform}   workers: {config.launch.nproc}   config: {configuration.config_hash(config)}"
    )
    console.print(plan_table(plan_rows(config)))
    environment = worker_environment(
        platform=config.platform.name,
        sleeps=config.offload.train,
        threads_per_worker=config.launch.threads_per_worker,
    )
    result = launch(
        run, Job(config, directory), nproc=config.launch.nproc, log_dir=directory / "logs", environment=environment
    )
    for table in final_tables(read_records(directory / METRICS_FILE), read_records(directory / MEMORY_FILE)):
        console.print(table)
    console.print(f"report: {directory / 'report.md'}", soft_wrap=True)
    return result.get("heldout_accuracy")


@hydra.main(config_path="pkg://conf", config_name="train", version_base="1.3")
def _hydra_job(composed: DictConfig) -> float | None:
    console, settings = Console(), HydraConfig.get()
    try:
        config = configuration.to_config(composed)
        return run_job(config, Path(settings.runtime.output_dir), console)
    except (ValueError, ImportError, OmegaConfBaseException, WorkerError) as error:
        hint = hint_for(error)
        message = f"{error}\nhint: {hint}" if hint else str(error)
        if settings.mode == RunMode.MULTIRUN:
            raise JobError(message) from None
        print(f"error: {message}", file=sys.stderr)
        sys.exit(1)


def main() -> None:
    """Entry point of ``python -m trainer`` and of the console script ``torpor``."""
    configuration.register()
    try:
        _hydra_job()
    except SystemExit as error:
        if error.code not in (0, None) and not isinstance(error.__context__, OmegaConfBaseException | JobError):
            hint = hint_for_flags(sys.argv[1:]) or hint_for(error)
            if hint:
                print(f"hint: {hint}", file=sys.stderr)
        raise


if __name__ == "__main__":
    main()
