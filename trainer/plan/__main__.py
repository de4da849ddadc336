"""``python -m trainer.plan``: the bytes of a run as tables, in seconds, without a GPU, workers or megatron.

A sweep (``-m memory=full,lean``) prints one table with a row per job.
"""

from __future__ import annotations

from trainer.command.hashes import restart_with_fixed_hashes
from trainer.common import garbage

if __name__ == "__main__":
    restart_with_fixed_hashes()
    garbage.pause()

import atexit
import functools
import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Optional

import hydra
from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from rich.console import Console

from trainer.command import exits
from trainer.command.arguments import refuse_bad_overrides
from trainer.common.limits import Limits, check_value
from trainer.common.machine import gpu_memory_bytes
from trainer.common.terminal import new_console, tell
from trainer.common.units import byte_unit
from trainer.config import compose as configuration
from trainer.config.hints import hint_for
from trainer.config.pieces import make_task
from trainer.config.schema import ComposedConfig, Config, Section
from trainer.config.settings import said_of
from trainer.plan import Plan, make_plan
from trainer.plan.activations import micro_batch_tokens
from trainer.plan.fit import check_fits, fits
from trainer.plan.footprint import Footprint, footprint
from trainer.plan.holdings import Holding
from trainer.plan.micro_batch import with_micro_batch_tokens
from trainer.plan.role_bytes import model_parameters
from trainer.plan.schedule import Schedule
from trainer.plan.schedule_rows import predicted_seconds, schedule_rows
from trainer.report import Table
from trainer.report.schedule import draw_schedule, moves_table, schedule_table
from trainer.rollout.engines import planned_bytes
from trainer.tasks.tokenizer import vocab_size_of


@dataclass
class PlanConfig(Section):
    """The section ``plan``; its defaults lie in ``conf/plan.yaml``."""

    vocab_size: Annotated[Optional[int], Limits(1, 10_000_000)]  # noqa: UP045
    figure: Optional[str]  # noqa: UP045
    bus_gb_per_s: Annotated[float, Limits(1e-6, 1e6)]
    disk_gb_per_s: Annotated[float, Limits(1e-6, 1e6)]


@dataclass
class PlanRoot(ComposedConfig):
    """The schema of ``conf/plan.yaml``."""

    plan: PlanConfig


@dataclass(frozen=True)
class Job:
    """One job of a sweep: its overrides, its prediction, and whether that fits; None where the config is refused."""

    overrides: Sequence[str]
    prediction: Footprint | None
    fits: bool


_sweep: list[Job] = []


def footprint_table(prediction: Footprint) -> Table:
    """Bytes per rank of every holding, with totals per role. What sleeps holds no GPU memory."""
    holdings = prediction.holdings
    unit, size = byte_unit(max(holding.train_bytes for holding in holdings))
    fields = ("train_bytes", "forward_bytes", "host_awake_bytes", "host_asleep_bytes")

    def amounts(of: Sequence[Holding], *, per: int | None) -> list[str]:
        sums = [sum(getattr(holding, field) for holding in of) for field in fields]
        return [*(f"{amount / size:.2f}" for amount in sums), f"{sums[-1] / per:.2f}" if per else ""]

    counts = prediction.parameter_counts
    rows = [(h.role, h.kind, h.keeper, *amounts([h], per=counts.get(h.role))) for h in holdings]
    totals = [(role, "all", "", *amounts(prediction.of_role(role), per=count)) for role, count in counts.items()]
    return Table(
        title=f"{unit} per rank: on the GPU in training and in forward passes, on the host awake and asleep",
        columns=("role", "buffer", "keeper", "train", "forward", "awake", "asleep", "B/param"),
        rows=rows,
        totals=totals,
        text_columns=3,
    )


def moment_table(prediction: Footprint) -> Table:
    """Peak of every stretch of a run, per rank and per node."""
    unit, size = byte_unit(prediction.device_peak_bytes)
    peaks = [
        (
            *(mine.name, mine.device_bytes, mine.activation_bytes, mine.host_bytes),
            *(everyones.device_bytes + everyones.activation_bytes, everyones.host_bytes),
        )
        for mine, everyones in zip(prediction.moments, prediction.node_moments, strict=True)
    ]
    largest = [max(sizes) for sizes in zip(*(peak[1:] for peak in peaks), strict=True)]

    def row(name: str, *amounts: int) -> tuple[str, ...]:
        return (name, *(f"{amount / size:.2f}" for amount in amounts))

    return Table(
        title=f"{unit} per rank and on the node (x{prediction.ranks}); CUDA and NCCL come on top",
        columns=("while", "GPU", "activations", "host", "node's GPUs", "node's host"),
        rows=[row(*peak) for peak in peaks],
        totals=[row("largest", *largest)],
    )


def comparison_table(sweep: Sequence[Job]) -> Table:
    """One row per job: host bytes asleep per role on the node and per parameter, and the peaks."""
    shared = set.intersection(*(set(job.overrides) for job in sweep)) if len(sweep) > 1 else set()
    unit, size = byte_unit(max((job.prediction.device_peak_bytes for job in sweep if job.prediction), default=0))
    roles = list(dict.fromkeys(role for job in sweep if job.prediction for role in job.prediction.parameter_counts))
    rows = []
    for job in sweep:
        own, found = " ".join(override for override in job.overrides if override not in shared), job.prediction
        if found is None:
            rows.append((own, *["-"] * (2 * len(roles) + 3)))
            continue
        counts, asleep = found.parameter_counts, {role: found.host_asleep_bytes(role) for role in roles}
        per_parameter = [f"{asleep[role] / counts[role]:.2f}" if role in counts else "-" for role in roles]
        everyones = [found.node_host_asleep[role] if role in counts else 0 for role in roles]
        on_node = [f"{amount / size:.2f}" for amount in (*everyones, sum(everyones))]
        peak = f"{found.device_peak_bytes / size:.2f}"
        rows.append((own, *per_parameter, *on_node, peak, "yes" if job.fits else "no"))
    return Table(
        title=f"Asleep on the host: bytes per parameter, {unit} on the node; peak per GPU in {unit}",
        columns=("overrides", *(f"{role}\nB/param" for role in roles), *roles, "all", "GPU", "fits"),
        rows=rows,
    )


def plan_job(composed: DictConfig, *, overrides: Sequence[str], in_sweep: bool, console: Console) -> None:
    """Count one composed config and show it (in a sweep: remember it). Raises ValueError for what is refused."""
    keys = list(Config.__dataclass_fields__)
    config = configuration.to_config(OmegaConf.masked_copy(composed, keys))
    vocab_size = composed.plan.vocab_size
    for field in PlanConfig.__dataclass_fields__:
        check_value(f"plan.{field}", composed.plan[field], said_of(PlanConfig, field))
    if vocab_size is None:
        vocab_size = vocab_size_of(config.tokenizer.path, task=make_task(config), vocab_size=config.largest_vocab_size)
    engine = planned_bytes(config, vocab_size=vocab_size)
    config = with_micro_batch_tokens(config, vocab_size=vocab_size, engine=engine)
    gpu_bytes = gpu_memory_bytes() if config.platform.name == "cuda" else None
    prediction = footprint(config, vocab_size=vocab_size, engine=engine, reported_gpu_bytes=gpu_bytes)
    if in_sweep:
        _sweep.append(Job(overrides, prediction, fits(config, prediction)))
        return
    whole = model_parameters(config, vocab_size=vocab_size)
    counts = ", ".join(f"{role} {count:.4g}" for role, count in whole.items())
    tokens = f"{micro_batch_tokens(config)} tokens a micro-batch at most"
    console.print(f"parameters: {counts}   vocabulary: {vocab_size}   ranks: {prediction.ranks}   {tokens}")
    console.print(footprint_table(prediction))
    console.print(moment_table(prediction))
    if prediction.node_checkpoint_bytes:
        unit, size = byte_unit(prediction.node_checkpoint_bytes)
        amount = prediction.node_checkpoint_bytes / size
        console.print(f"while a checkpoint is written in the background: {amount:.2f} {unit} more on the node's host")
    if prediction.schedule is not None and config.offload.auto:
        _show_schedule(composed.plan, make_plan(config), prediction.schedule, console=console)
    check_fits(config, vocab_size=vocab_size, engine=engine, gpu_bytes=gpu_bytes)


def _show_schedule(settings: PlanConfig, plan: Plan, schedule: Schedule, *, console: Console) -> None:
    rows = schedule_rows(schedule)
    rates = {"bus_gb_per_s": settings.bus_gb_per_s, "disk_gb_per_s": settings.disk_gb_per_s}
    seconds = predicted_seconds(schedule, plan, **rates)
    console.print(schedule_table(rows))
    console.print(moves_table(rows, seconds=seconds))
    if settings.figure is not None:
        draw_schedule(rows, Path(settings.figure))
        console.print(f"figure: {settings.figure}")


@hydra.main(config_path="pkg://conf", config_name="plan", version_base="1.3")
def _hydra_job(composed: DictConfig) -> None:
    settings = HydraConfig.get()
    overrides, in_sweep = list(settings.overrides.task), settings.mode == RunMode.MULTIRUN
    os.chdir(settings.runtime.cwd)
    try:
        plan_job(composed, overrides=overrides, in_sweep=in_sweep, console=new_console())
        return
    except (ValueError, ImportError, OmegaConfBaseException) as error:
        hint = hint_for(error)
        tell(f"error: {error}" + (f"\nhint: {hint}" if hint else ""))
    if not in_sweep:
        raise exits.Said(exits.REFUSED)
    _sweep.append(Job(overrides, None, False))


@functools.cache
def _temporary_directory() -> str:
    directory = tempfile.TemporaryDirectory(prefix="torpor-plan-")
    atexit.register(directory.cleanup)
    return directory.name


def main() -> None:
    garbage.pass_by_what_exists()
    refuse_bad_overrides()
    configuration.register()
    ConfigStore.instance().store(name="plan_schema", node=PlanRoot)
    OmegaConf.register_new_resolver("temporary_directory", _temporary_directory, replace=True)
    code = exits.code_of(_hydra_job)
    if _sweep:
        new_console().print(comparison_table(_sweep))
        if not all(job.prediction for job in _sweep):
            code = code or exits.REFUSED
    exits.leave(code)


if __name__ == "__main__":
    main()
