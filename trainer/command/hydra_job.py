"""What Hydra calls for every job, in whichever process its launcher has chosen: check, plan, launch, show the result.

The function lies in a module of its own so that launchers which pickle it (joblib, submitit, Ray) find it by name. The
process never imports megatron nor touches a GPU, so every job of a sweep starts clean.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, nullcontext
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException
from rich.console import Console

from trainer.checkpoint import folder as checkpoints
from trainer.command import jobs
from trainer.command.attempts import exit_if_asked, launch_attempts
from trainer.command.launch import WorkerError
from trainer.command.nodes import Nodes, find_nodes
from trainer.common.files import UnwritableFile
from trainer.common.machine import gpu_memory_bytes, host_memory_limit_bytes
from trainer.common.terminal import new_console
from trainer.config import compose as configuration
from trainer.config import objectives
from trainer.config.hints import hint_for
from trainer.config.identity import config_hash
from trainer.config.pieces import make_task
from trainer.config.schema import Config
from trainer.data.encoding import Encoder
from trainer.data.rewards import check_rewards
from trainer.data.selection import select
from trainer.models.folders import check_folders
from trainer.plan import make_plan
from trainer.plan.fit import check_fits
from trainer.plan.footprint import footprint, plan_rows
from trainer.plan.micro_batch import with_micro_batch_tokens
from trainer.report import MEMORY_FILE, METRICS_FILE, REPORT_FILE, final_tables, plan_table, read_records
from trainer.report.records import read_result
from trainer.rollout.engines import planned_bytes
from trainer.tasks import Task
from trainer.tasks.tokenizer import light_tokenizer, vocabulary_size


class JobError(RuntimeError):
    """A job of a sweep failed; one string, so that every launcher can pickle it."""


def hydra_job(composed: DictConfig) -> float | tuple[float, ...]:
    """Run one composed job and return its objective, or several, to the sweeper.

    Raises:
        JobError: it failed, in a sweep; the other jobs still run.
        SystemExit: it failed, in a single run; or a signal ended it, which ends a sweep too.
    """
    configuration.register()  # in a launcher's process nobody has
    settings = HydraConfig.get()
    os.chdir(settings.runtime.cwd)  # relative paths start where the command runs, whatever hydra.job.chdir says
    directory, in_sweep = Path(settings.runtime.output_dir), settings.mode == RunMode.MULTIRUN
    with ExitStack() as stack:
        if in_sweep and jobs.SweepDirectory.path is None:  # a launcher's process: others write to the terminal too
            stack.enter_context(jobs.own_output(directory))
        try:
            config = jobs.as_begun(
                configuration.to_config(composed),
                directory,
                left_open=configuration.left_to_the_machine(composed),
            )
            results = run_job(config, directory, new_console())
            return objectives.values(results, names=config.objective)
        except (ValueError, ImportError, OmegaConfBaseException, WorkerError, UnwritableFile) as error:
            message = _message(error)
        print(f"error: {message}", file=sys.stderr)
        jobs.write_failure(directory, message)
    if in_sweep:
        raise JobError(f"the job in {directory} failed: {message.splitlines()[0]}")
    sys.exit(1)


def _message(error: Exception) -> str:
    text, hint = str(error), hint_for(error)
    if isinstance(error, OmegaConfBaseException):  # the other lines are omegaconf's types
        text = f"{error.full_key}: {text.splitlines()[0]}"
    return f"{text}\nhint: {hint}" if hint else text


def run_job(config: Config, directory: Path, console: Console) -> Mapping[str, float]:
    """Launch one validated job, or find its result, and return all that can be an objective."""
    nodes = find_nodes(config.launch, os.environ)
    _check_devices(config)
    check_folders(config)
    task = make_task(config)
    tokenizer = light_tokenizer(config.tokenizer.path, task=task, vocab_size=config.largest_vocab_size)
    vocab_size = vocabulary_size(tokenizer)
    engine = planned_bytes(config, vocab_size=vocab_size)
    config = with_micro_batch_tokens(config, vocab_size=vocab_size, engine=engine)
    gpu_bytes = gpu_memory_bytes() if config.platform.name == "cuda" else None
    limits = {"host_bytes": host_memory_limit_bytes(), "gpu_bytes": gpu_bytes}
    check_fits(config, vocab_size=vocab_size, engine=engine, **limits)
    plan = plan_rows(footprint(config, vocab_size=vocab_size, engine=engine, reported_gpu_bytes=gpu_bytes))
    encoder = Encoder(config.tokenizer, tokenizer)
    with jobs.held(directory) if nodes.rank == 0 else nullcontext():
        return _run_held(config, directory, console, nodes=nodes, plan=plan, task=task, encoder=encoder)


def _run_held(
    config: Config,
    directory: Path,
    console: Console,
    *,
    nodes: Nodes,
    plan: Sequence[Mapping[str, Any]],
    task: Task,
    encoder: Encoder,
) -> Mapping[str, float]:
    # Only node 0 judges what the folder holds: by then it may have written its own config there.
    earlier = jobs.finished(directory, config) if nodes.rank == 0 else read_result(directory)
    if earlier is not None:
        console.print(f"finished already: {directory}", soft_wrap=True)
        return earlier
    check_rewards(config, task)
    selection = select(config, task, encoder=encoder, console=console)
    checkpoint = None  # of which other nodes learn from node 0
    if nodes.rank == 0:
        checkpoint = checkpoints.starting_point(config, directory)
        jobs.claim(directory, config, checkpoint)
    _announce(config, nodes, console, plan=plan, checkpoint=checkpoint)
    console.print(selection.summary)
    record = launch_attempts(
        config, directory, checkpoint=checkpoint, selection=selection, nodes=nodes, say=console.print
    )
    if nodes.rank > 0:
        return objectives.of_record(record)
    metrics, memory = read_records(directory / METRICS_FILE), read_records(directory / MEMORY_FILE)
    for table in final_tables(metrics, memory, plan=plan):
        console.print(table)
    if (directory / REPORT_FILE).exists():  # a worker that could not write it has said so
        console.print(f"report: {directory / REPORT_FILE}", soft_wrap=True)
    results = objectives.of_record(record)
    jobs.write_result(directory, results)
    exit_if_asked(directory)
    return results


def _announce(
    config: Config, nodes: Nodes, console: Console, *, plan: Sequence[Mapping[str, Any]], checkpoint: Path | None
) -> None:
    platform = "cpu (stand-in for CUDA)" if config.platform.name == "cpu" else config.platform.name
    where = f" on node {nodes.rank} of {nodes.count}" if nodes.count > 1 else ""
    console.print(f"platform: {platform}   workers: {config.launch.nproc}{where}   config: {config_hash(config)}")
    if checkpoint is not None:
        console.print(f"goes on from {checkpoint}", soft_wrap=True)
    console.print(plan_table(plan))


def _check_devices(config: Config) -> None:
    if config.platform.name == "cuda" and torch.cuda.device_count() < config.launch.nproc:
        raise ValueError(
            f"launch.nproc={config.launch.nproc} with platform=cuda needs a GPU for each worker, and "
            f"{torch.cuda.device_count()} are visible: use fewer workers, or platform=cpu"
        )
    keepers = {row.keeper for row in make_plan(config).rows}
    has_coder = find_spec("nvidia") is not None and find_spec("nvidia.nvcomp") is not None
    if config.platform.name == "cuda" and "packed" in keepers and not has_coder:
        raise ImportError("optim_keeper=packed with platform=cuda needs nvCOMP: pip install 'torpor[packed]'")
