"""What is measured: the memory policies of this project and, for comparison, the ways of its peers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import List  # noqa: UP035  (omegaconf reads these annotations)

from trainer.config.schema import ComposedConfig, Config, Section


@dataclass
class BenchConfig(Section):
    """The section ``bench``; its defaults lie in ``conf/bench.yaml``."""

    cases: List[str]  # noqa: UP006
    cycles: int
    vocab_size: int
    roofline_mib: int
    case_timeout_seconds: int


@dataclass
class BenchRoot(ComposedConfig):
    """The schema of ``conf/bench.yaml``."""

    bench: BenchConfig


@dataclass(frozen=True)
class Case:
    """One row of the table.

    Attributes:
        overrides: what the case changes in the config.
        peer: name of a class in :mod:`trainer.bench.peers` that replaces the role; None for the product.
        swaps: the roles follow each other on a device that has room for one.
    """

    meaning: str
    overrides: tuple[str, ...]
    peer: str | None = None
    needs_gpu: bool = False
    swaps: bool = False


@dataclass(frozen=True)
class CaseJob:
    """What the parent hands to the workers of one case."""

    config: Config
    bench: BenchConfig
    peer: str | None


_SAVER_KEEPS_OPTIM = ("memory.actor.optim_keeper=saver", "memory.critic.optim_keeper=saver")
_ARENA_KEEPS_OPTIM = ("memory.actor.optim_keeper=arena", "memory.critic.optim_keeper=arena")

CASES = {
    "full": Case("memory=full", ("memory=full",)),
    "no_grads": Case("memory=no_grads", ("memory=no_grads",)),
    "lean_saver": Case("memory=lean, saver keeps the optimizer state", ("memory=lean", *_SAVER_KEEPS_OPTIM)),
    "lean": Case("memory=lean, arena keeps the optimizer state", ("memory=lean", *_ARENA_KEEPS_OPTIM)),
    "lean_sharded": Case(
        "as lean, each data-parallel rank keeps its share of the actor's tag",
        ("memory=lean", *_ARENA_KEEPS_OPTIM, "memory.tags=sharded"),
    ),
    "lean_node": Case(
        "as lean, the ranks of a node have one copy of the actor's tag",
        ("memory=lean", *_ARENA_KEEPS_OPTIM, "memory.tags=node"),
    ),
    "rebuild_saver": Case("memory=rebuild, saver keeps the optimizer state", ("memory=rebuild", *_SAVER_KEEPS_OPTIM)),
    "rebuild": Case("memory=rebuild, arena keeps the optimizer state", ("memory=rebuild", *_ARENA_KEEPS_OPTIM)),
    "packed": Case("memory=packed", ("memory=packed",)),
    "disk": Case("memory=disk, in memory.disk.path", ("memory=disk",)),
    "swap": Case(
        "as lean, the GPU is handed from one role to the other (offload=auto)",
        ("memory=lean", *_ARENA_KEEPS_OPTIM, "offload=auto"),
        swaps=True,
    ),
    "swap_rebuild": Case("as rebuild, likewise", ("memory=rebuild", *_ARENA_KEEPS_OPTIM, "offload=auto"), swaps=True),
    "naive": Case(
        "peer: the saver copies everything and keeps no host buffers",
        ("memory=full", *_SAVER_KEEPS_OPTIM, "memory.retain_cpu_backup=false"),
    ),
    "megatron": Case(
        "peer: megatron-core's own offload_to_cpu calls", ("offload=none",), peer="MegatronOffload", needs_gpu=True
    ),
    "slime": Case(
        "peer: slime-like, per-tensor backuper, optimizer state where the first step made it",
        ("memory=lean", *_SAVER_KEEPS_OPTIM, "memory.retain_cpu_backup=false"),
        peer="SlimeLike",
    ),
}
_GIVEN_BY_CASE = ("memory", "offload", "memory.tags", "memory.actor.optim_keeper", "memory.critic.optim_keeper")


def check(bench: BenchConfig, overrides: Sequence[str]) -> None:
    """Raise ValueError for unknown cases, sizes below one, and command-line overrides that a case itself gives."""
    unknown = [name for name in bench.cases if name not in CASES]
    if unknown or not bench.cases:
        raise ValueError(f"bench.cases={bench.cases}: must be some of {', '.join(CASES)}")
    for field in ("cycles", "vocab_size", "roofline_mib", "case_timeout_seconds"):
        if getattr(bench, field) < 1:
            raise ValueError(f"bench.{field}={getattr(bench, field)}: must be at least 1")
    for override in overrides:
        if override.partition("=")[0].lstrip("+") in _GIVEN_BY_CASE:
            raise ValueError(f"{override}: every case has its own; choose with bench.cases=[{','.join(CASES)}]")


def log_dir(directory: Path, name: str) -> Path:
    """Where the workers of one case write their logs."""
    return directory / "logs" / name
