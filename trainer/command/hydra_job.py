"""What Hydra calls for every job, in whichever process its launcher has chosen: check, plan, launch, show the result.

The function lies in a module of its own so that launchers which pickle it (joblib, submitit, Ray) find it by name. The
process never imports megatron nor touches a GPU, so every job of a sweep starts clean.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from rich.console import Console

from trainer.checkpoint import folder as checkpoints
from trainer.command import exits, jobs, sweep_notes, sweep_processes
from trainer.command.attempts import exit_if_asked, launch_attempts
from trainer.command.exits import JobError
from trainer.command.launch import WorkerError
from trainer.command.nodes import Nodes, find_nodes
from trainer.common.files import UnwritableFile
from trainer.common.machine import gpu_memory_bytes, host_memory_limit_bytes
from trainer.common.terminal import new_console, tell
from trainer.config import compose as configuration
from trainer.config import objectives
from trainer.config.hints import hint_for
from trainer.config.identity import config_hash
from trainer.config.pieces import make_task
from trainer.config.schema import Config
from trainer.data.encoding import Encoder
from trainer.data.rewards import check_rewards
from trainer.data.selection import Selection, select
from trainer.models.folders import check_folders
from trainer.plan import make_plan
from trainer.plan.fit import check_fits
from trainer.plan.footprint import footprint, plan_rows
from trainer.plan.micro_batch import with_micro_batch_tokens
from trainer.report import MEMORY_FILE, METRICS_FILE, REPORT_FILE, final_tables, plan_table, read_records
from trainer.report.loggers import check_installed
from trainer.report.records import read_result
from trainer.rollout.engines import planned_bytes
from trainer.tasks.tokenizer import light_tokenizer, vocabulary_size

# Of settings, modules and files that a user can change before the same command.
_REFUSALS = (ValueError, ImportError, OmegaConfBaseException)


def hydra_job(composed: DictConfig) -> float | tuple[float, ...]:
    """Run one composed job and return its objective, or several, to the sweeper.

    Raises:
        JobError: it did not finish, in a sweep; the other jobs still run.
        SystemExit: it did not finish, in a single run (see :mod:`trainer.command.exits`); or a signal ended it, which
            ends a sweep too.
    """
    configuration.register()  # in a launcher's process nobody has
    settings = HydraConfig.get()
    os.chdir(settings.runtime.cwd)  # relative paths start where the command runs, whatever hydra.job.chdir says
    directory = Path(settings.runtime.output_dir)
    sweep = Path(settings.sweep.dir).absolute() if settings.mode == RunMode.MULTIRUN else None
    record, code = _hydra_record(composed), exits.FAILED
    with ExitStack() as stack:
        if sweep is not None:
            stack.enter_context(sweep_processes.job_of(sweep))

        def own_output() -> None:
            if sweep is not None and jobs.SweepDirectory.path is None:  # a launcher's process: others write there too
                stack.enter_context(jobs.own_output(directory))

        try:
            config = jobs.as_begun(
                configuration.to_config(composed),
                directory,
                left_open=configuration.left_to_the_machine(composed),
            )
            results = run_job(config, directory, hydra_record=record, own_output=own_output)
            return objectives.values(results, names=config.objective)
        except _REFUSALS as error:
            message, code = _message(error), exits.REFUSED
            jobs.note_refusal(directory, message, record)
        except (WorkerError, UnwritableFile) as error:
            message = _message(error)
        tell(f"error: {message}")
    if sweep is None:
        raise exits.Said(code)
    overrides = list(settings.overrides.task)
    sweep_notes.add(sweep, sweep_notes.Note(os.path.relpath(directory, sweep), overrides, message, code))
    verb = "was refused" if code == exits.REFUSED else "failed"
    raise JobError(f"the job in {directory} {verb}: {message.splitlines()[0]}")


def _hydra_record(composed: DictConfig) -> Mapping[str, str]:
    """The files of Hydra's own record: what it composed, how, and of which overrides."""
    hydra = HydraConfig.instance().cfg
    assert hydra is not None
    overrides = OmegaConf.create(list(HydraConfig.get().overrides.task))
    whole = {"config.yaml": composed, "hydra.yaml": hydra, "overrides.yaml": overrides}
    return {name: OmegaConf.to_yaml(config) for name, config in whole.items()}


def _message(error: Exception) -> str:
    text, hint = str(error), hint_for(error)
    if isinstance(error, OmegaConfBaseException):  # the other lines are omegaconf's types
        text = f"{error.full_key}: {text.splitlines()[0]}"
    return f"{text}\nhint: {hint}" if hint else text


def run_job(
    config: Config, directory: Path, *, hydra_record: Mapping[str, str], own_output: Callable[[], None]
) -> Mapping[str, float]:
    """Launch one validated job, or find its result, and return all that can be an objective.

    ``own_output`` is called once the directory has been found to be the job's own, or nobody's.
    """
    nodes = find_nodes(config.launch, os.environ)
    _check_devices(config)
    check_installed(config.logger)
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
    encoder = Encoder.of(config, tokenizer)
    if nodes.rank == 0:
        jobs.finished(directory, config)  # whether it is another job's: before a lock is left there
        jobs.require_room(directory)
    with jobs.held(directory) if nodes.rank == 0 else nullcontext():
        # Only node 0 judges what the folder holds: by then it may have written its own config there.
        earlier = jobs.finished(directory, config) if nodes.rank == 0 else read_result(directory)
        own_output()
        console = new_console()
        if earlier is not None:
            console.print(f"finished already: {directory}", soft_wrap=True)
            return earlier
        check_rewards(config, task)
        selection = select(config, task, encoder=encoder, console=console)
        checkpoint = None  # of which other nodes learn from node 0
        if nodes.rank == 0:
            checkpoint = checkpoints.starting_point(config, directory, questions=selection.digest)
            jobs.claim(directory, config, checkpoint, hydra_record=hydra_record)
        _announce(config, nodes, console, plan=plan, checkpoint=checkpoint)
        console.print(selection.summary)
        try:
            return _run_held(
                config, directory, console, nodes=nodes, plan=plan, checkpoint=checkpoint, selection=selection
            )
        except (WorkerError, UnwritableFile, *_REFUSALS) as error:
            jobs.write_failure(directory, _message(error))
            raise


def _run_held(
    config: Config,
    directory: Path,
    console: Console,
    *,
    nodes: Nodes,
    plan: Sequence[Mapping[str, Any]],
    checkpoint: Path | None,
    selection: Selection,
) -> Mapping[str, float]:
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
