"""``python -m trainer``: compose the config, check it, plan, launch the workers, show the result.

This process composes and waits; it never imports megatron nor touches a GPU, so every job of a sweep starts clean.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import hydra
import torch
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException
from rich.console import Console

from trainer import config as configuration
from trainer import jobs
from trainer.checkpoint import folder as checkpoints
from trainer.config import Config
from trainer.hints import hint_for, hint_for_flags
from trainer.launch import WorkerError, launch
from trainer.launch_environment import worker_environment
from trainer.plan.fit import check_fits
from trainer.plan.footprint import footprint, plan_rows
from trainer.report import MEMORY_FILE, METRICS_FILE, final_tables, plan_table, read_records
from trainer.rules import make_task
from trainer.tokenizer import vocab_size_of
from trainer.worker import Job, run


class JobError(RuntimeError):
    """A job of a sweep failed; one string, so that every launcher can pickle it."""


def run_job(config: Config, directory: Path, console: Console) -> float | None:
    """Launch one validated job and return its objective, the held-out accuracy at the end."""
    _check_devices(config)
    vocab_size = vocab_size_of(config.tokenizer.path, task=make_task(config), vocab_size=config.largest_vocab_size)
    check_fits(config, vocab_size=vocab_size)
    earlier = jobs.finished(directory, config)
    if earlier is not None:
        console.print(f"finished already: {directory}", soft_wrap=True)
        return earlier["heldout_accuracy"]
    checkpoint = checkpoints.starting_point(config, directory)
    jobs.claim(directory, config, checkpoint)
    platform = "cpu (stand-in for CUDA)" if config.platform.name == "cpu" else config.platform.name
    console.print(
        f"platform: {platform}   workers: {config.launch.nproc}   config: {configuration.config_hash(config)}"
    )
    if checkpoint is not None:
        console.print(f"goes on from {checkpoint}", soft_wrap=True)
    plan = plan_rows(footprint(config, vocab_size=vocab_size))
    console.print(plan_table(plan))
    environment = worker_environment(
        platform=config.platform.name,
        sleeps=config.offload.train,
        threads_per_worker=config.launch.threads_per_worker,
    )
    job = Job(config, directory, resume_from=checkpoint)
    result = launch(run, job, nproc=config.launch.nproc, log_dir=directory / "logs", environment=environment)
    metrics, memory = read_records(directory / METRICS_FILE), read_records(directory / MEMORY_FILE)
    for table in final_tables(metrics, memory, plan=plan):
        console.print(table)
    console.print(f"report: {directory / 'report.md'}", soft_wrap=True)
    jobs.write_result(directory, {"heldout_accuracy": result["heldout_accuracy"]})
    return result["heldout_accuracy"]


def _check_devices(config: Config) -> None:
    if config.platform.name == "cuda" and torch.cuda.device_count() < config.launch.nproc:
        raise ValueError(
            f"launch.nproc={config.launch.nproc} with platform=cuda needs a GPU for each worker, and "
            f"{torch.cuda.device_count()} are visible: use fewer workers, or platform=cpu"
        )


@hydra.main(config_path="pkg://conf", config_name="train", version_base="1.3")
def _hydra_job(composed: DictConfig) -> float | None:
    console, settings = Console(), HydraConfig.get()
    os.chdir(settings.runtime.cwd)  # relative paths start where the command runs, whatever hydra.job.chdir says
    try:
        config = configuration.to_config(composed)
        return run_job(config, Path(settings.runtime.output_dir), console)
    except (ValueError, ImportError, OmegaConfBaseException, WorkerError) as error:
        print(f"error: {_message(error)}", file=sys.stderr)
    if settings.mode == RunMode.MULTIRUN:  # an exception and no exit: the other jobs still run
        raise JobError(f"the job in {settings.runtime.output_dir} failed; its error is above")
    sys.exit(1)


def _message(error: Exception) -> str:
    text, hint = str(error), hint_for(error)
    if isinstance(error, OmegaConfBaseException):  # the other lines are omegaconf's types
        text = f"{error.full_key}: {text.splitlines()[0]}"
    return f"{text}\nhint: {hint}" if hint else text


def _show_sweep() -> bool:
    """Show what became of every job of a sweep. Whether it was no sweep or had jobs."""
    if jobs.SweepDirectory.path is None:
        return True
    table = jobs.sweep_table(jobs.SweepDirectory.path)
    if table.rows:
        Console().print(table)
        _compare(jobs.SweepDirectory.path)
    return bool(table.rows)


def _compare(sweep: Path) -> None:
    """Write the comparison of a sweep's jobs. Whatever goes wrong with it, the sweep's own end is what counts."""
    try:
        from trainer.report.compare_page import write_comparison

        page = write_comparison([sweep], output=sweep).page
        Console().print(f"comparison: {page}", soft_wrap=True)
    except Exception as error:
        print(f"the comparison could not be written: {type(error).__name__}: {error}", file=sys.stderr)


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
    finally:
        did_something = _show_sweep()
    if not did_something:
        print("error: the sweep has no jobs, since one of its overrides lists no values", file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    main()
