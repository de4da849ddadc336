"""What each role and the rollout engine hold on one rank, by buffer kind, on device and host, awake and asleep."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from trainer.config.schema import Config
from trainer.plan import NO_BUFFER, Plan, PlanRow, make_plan
from trainer.plan.keepers import OWN_KEEPERS, KeptBytes, kept_bytes
from trainer.plan.role_bytes import RoleBytes, ranks_that_share_tags, role_bytes

ENGINE = "engine"


@dataclass(frozen=True)
class Holding:
    """Bytes per rank of one buffer kind (or weights tag, ``weights/<tag>``) of one role (or the engine).

    Device bytes while the role trains, does forward passes with its own weights, and sleeps; host bytes while it is
    awake (what stays page-locked between sleeps) and asleep; bytes of a file.
    """

    role: str
    kind: str
    keeper: str
    flag: bool | None = None
    note: str = ""
    train_bytes: int = 0
    forward_bytes: int = 0
    asleep_bytes: int = 0
    host_awake_bytes: int = 0
    host_asleep_bytes: int = 0
    disk_bytes: int = 0

    def device_bytes(self, state: str) -> int:
        """``state``: train, forward, asleep, or absent (not built yet)."""
        return 0 if state == "absent" else getattr(self, f"{state}_bytes")

    def host_bytes(self, state: str) -> int:
        awake = 0 if state == "absent" else self.host_awake_bytes
        return self.host_asleep_bytes if state == "asleep" else awake


@dataclass(frozen=True)
class EngineBytes:
    """What the rollout engine holds, which it says itself; see :mod:`trainer.rollout.engines`.

    Attributes:
        holdings: of the role :data:`ENGINE`, on one rank.
        has_own_weights: the actor sleeps during rollouts, and its weights are copied to the engine before.
    """

    holdings: tuple[Holding, ...]
    has_own_weights: bool


def arena_bytes(config: Config, *, vocab_size: int, stage: int) -> dict[str, int]:
    """Region tag or ``weights/<tag>`` -> bytes of its host arena on a rank of a pipeline stage; it can be made before
    any model is."""
    plan = make_plan(config)
    sizes = {role: role_bytes(config, role, vocab_size=vocab_size, stage=stage) for role in config.roles}
    return {owner: size for role, found in sizes.items() for owner, size in _arenas(config, plan, role, found)}


def _arenas(config: Config, plan: Plan, role: str, sizes: RoleBytes) -> Iterator[tuple[str, int]]:
    optim = plan.row(role, "optim")
    if kept := _kept(config, optim, sizes).arena:
        yield optim.tag, kept
    if role == "actor":
        if plan.row(role, "param").keeper != "main_params":
            yield f"weights/{role}", sizes.tag
        yield "weights/ref", sizes.tag


def _kept(config: Config, row: PlanRow, sizes: RoleBytes) -> KeptBytes:
    if row.kind != "optim":
        return KeptBytes()
    return kept_bytes(
        row.keeper, sizes.kinds["optim"], main_params=sizes.main_params, optim_format=config.memory.optim_format
    )


def role_holdings(config: Config, plan: Plan, role: str, sizes: RoleBytes) -> Iterator[Holding]:
    keeps_own_tag = role == "actor" and plan.row(role, "param").keeper != "main_params"
    own_tag_kind = "param" if config.roles[role].ddp.use_distributed_optimizer else "rest"
    own_tag_restores = plan.row(role, own_tag_kind).keeper == "backuper"
    retains = config.platform.name == "cuda" and config.memory.retain_cpu_backup
    for row in plan.of_role(role):
        if row.keeper == NO_BUFFER:
            continue
        size = sizes.kinds[row.kind]
        copy = size if row.saver_backup else 0
        holds_tag = own_tag_restores and row.kind == own_tag_kind
        kept = _kept(config, row, sizes)
        lasting = kept.host + (sizes.tag if holds_tag else 0)
        yield Holding(
            role,
            row.kind,
            row.keeper,
            row.flag,
            _joined(row.note, _share_note(config)) if holds_tag else row.note,
            train_bytes=size,
            forward_bytes=size if awake_for_forward(plan, row) else 0,
            asleep_bytes=0 if plan.sleeps else size,
            host_awake_bytes=lasting + (copy if retains else 0),
            host_asleep_bytes=lasting + copy,
            disk_bytes=kept.disk,
        )
    if keeps_own_tag and not own_tag_restores:
        yield _tag_holding(config, role, role, sizes)
    if role == "actor":
        yield _tag_holding(config, role, "ref", sizes)


def _share_note(config: Config) -> str:
    if config.memory.tags != "sharded":
        return ""
    ranks, of_experts = ranks_that_share_tags(config)
    if ranks != of_experts:
        dense, experts = (f"1/{count}" if count > 1 else "all" for count in (ranks, of_experts))
        return f"each rank keeps {dense}, of experts {experts}"
    return f"each rank keeps 1/{ranks}" if ranks > 1 else "one rank alone keeps all of it"


def _joined(*notes: str) -> str:
    return "; ".join(note for note in notes if note)


def _tag_holding(config: Config, role: str, tag: str, sizes: RoleBytes) -> Holding:
    what = "the reference model" if tag == "ref" else "kept for switching back from other tags"
    note = _joined(what, _share_note(config))
    return Holding(
        role, f"weights/{tag}", "backuper", note=note, host_awake_bytes=sizes.tag, host_asleep_bytes=sizes.tag
    )


def awake_for_forward(plan: Plan, row: PlanRow) -> bool:
    """Rebuilding reads main params; if the saver keeps the optimizer state, that wakes the whole of it."""
    if row.kind == "optim":
        reads_optim = plan.row(row.role, "param").keeper == "main_params" and row.keeper not in OWN_KEEPERS
        return reads_optim or not plan.sleeps
    return row.kind in ("param", "rest") or not plan.sleeps
