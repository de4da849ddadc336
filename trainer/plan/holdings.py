"""What each role and the rollout engine hold on one rank, by buffer kind, on device and host, awake and asleep."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from trainer.config.node_copies import ranks_of_a_copy
from trainer.config.roles import REFERENCE, RoleSpec, role_spec, role_specs
from trainer.config.schema import Config
from trainer.plan import NO_BUFFER, Plan, PlanRow, make_plan, weights_kind
from trainer.plan.keepers import OWN_KEEPERS, KeptBytes, kept_bytes
from trainer.plan.role_bytes import RoleBytes, ranks_that_share_tags, role_bytes
from trainer.plan.schedule import Schedule

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


def engine_bytes(config: Config, sizes: Mapping[str, tuple[int, str]], *, has_own_weights: bool) -> EngineBytes:
    """Kind -> (bytes of its region, a note), all of it lost in a sleep, as what an engine holds."""
    holdings = (
        Holding(
            ENGINE,
            kind,
            "none",
            note=note,
            train_bytes=size,
            forward_bytes=size,
            asleep_bytes=0 if config.offload.train else size,
        )
        for kind, (size, note) in sizes.items()
    )
    return EngineBytes(tuple(holdings), has_own_weights=has_own_weights)


def arena_bytes(config: Config, *, vocab_size: int, stage: int, schedule: Schedule | None = None) -> dict[str, int]:
    """Region tag or ``weights/<tag>`` -> bytes of its host arena on a rank of a pipeline stage; it can be made before
    any model is. What ``schedule`` never lets sleep, and tags that it keeps on the GPU, have none."""
    plan = make_plan(config)
    sizes = {role: role_bytes(config, role, vocab_size=vocab_size, stage=stage) for role in config.roles}
    return {
        owner: size
        for role, spec in role_specs(config).items()
        for owner, size in _arenas(config, plan, spec, sizes[role])
        if schedule is None or not _stays_on_device(owner, schedule)
    }


def _stays_on_device(owner: str, schedule: Schedule) -> bool:
    kind, _, tag = owner.partition("/")
    if kind == "weights":
        return tag in schedule.resident_tags
    return owner in schedule.states and not schedule.sleeps_ever(owner)


def _arenas(config: Config, plan: Plan, spec: RoleSpec, sizes: RoleBytes) -> Iterator[tuple[str, int]]:
    optim = plan.row(spec.name, "optim")
    if kept := _kept(config, optim, sizes).arena:
        yield optim.tag, kept
    for tag in backed_up_tags(plan, spec):
        yield f"weights/{tag}", sizes.tag


def backed_up_tags(plan: Plan, spec: RoleSpec) -> list[str]:
    """The tags that the role's weights backuper keeps: its own, unless its parameters are rebuilt, and the others."""
    own = [spec.name] if spec.has_backuper and plan.row(spec.name, "param").keeper != "main_params" else []
    return own + list(spec.tags or ())


def _kept(config: Config, row: PlanRow, sizes: RoleBytes) -> KeptBytes:
    if row.kind != "optim":
        return KeptBytes()
    return kept_bytes(
        row.keeper, sizes.kinds["optim"], main_params=sizes.main_params, optim_format=config.memory.optim_format
    )


def role_holdings(
    config: Config, plan: Plan, role: str, sizes: RoleBytes, *, schedule: Schedule | None
) -> Iterator[Holding]:
    """Of one role. What ``schedule`` never lets sleep is always there, and nobody keeps a copy of it on the host."""
    resident = schedule.resident_tags if schedule else frozenset()
    own_tag_kind = weights_kind(plan, role)
    own_tag_restores = plan.row(role, own_tag_kind).keeper == "backuper"
    retains = config.platform.name == "cuda" and config.memory.retain_cpu_backup
    for row in plan.of_role(role):
        if row.keeper == NO_BUFFER:
            continue
        size, stays = sizes.kinds[row.kind], schedule is not None and plan.sleeps and _never_sleeps(row, schedule)
        copy = size if row.saver_backup and not stays else 0
        holds_tag = own_tag_restores and row.kind == own_tag_kind and role not in resident
        kept = KeptBytes() if stays else _kept(config, row, sizes)
        lasting = kept.host + (sizes.tag_share if holds_tag else 0)
        yield Holding(
            role,
            row.kind,
            row.keeper,
            row.flag,
            _joined(row.note, _share_note(config, role)) if holds_tag else row.note,
            train_bytes=size,
            forward_bytes=size if stays or awake_for_forward(plan, row) else 0,
            asleep_bytes=size if stays or not plan.sleeps else 0,
            host_awake_bytes=lasting + (copy if retains else 0),
            host_asleep_bytes=lasting + copy,
            disk_bytes=kept.disk,
        )
    for tag in backed_up_tags(plan, role_spec(config, role)):
        if tag in resident or tag != role or not own_tag_restores:
            yield _tag_holding(config, role, tag, sizes, is_resident=tag in resident)


def _never_sleeps(row: PlanRow, schedule: Schedule) -> bool:
    region = f"{row.role}/param" if row.kind in ("param", "rest") else row.tag
    return region in schedule.states and not schedule.sleeps_ever(region)


def _share_note(config: Config, role: str) -> str:
    if config.memory.tags == "node":
        ranks = ranks_of_a_copy(config)
        return f"one copy of {ranks} ranks of a node, 1/{ranks} counted for each" if ranks > 1 else ""
    if config.memory.tags != "sharded" or not role_spec(config, role).is_trained:
        return ""
    ranks, of_experts = ranks_that_share_tags(config)
    if ranks != of_experts:
        dense, experts = (f"1/{count}" if count > 1 else "all" for count in (ranks, of_experts))
        return f"each rank keeps {dense}, of experts {experts}"
    return f"each rank keeps 1/{ranks}" if ranks > 1 else "one rank alone keeps all of it"


def _joined(*notes: str) -> str:
    return "; ".join(note for note in notes if note)


def _tag_holding(config: Config, role: str, tag: str, sizes: RoleBytes, *, is_resident: bool) -> Holding:
    what = "the reference model" if tag == REFERENCE else "kept for switching back from other tags"
    note = _joined(what, "on the GPU" if is_resident else "", _share_note(config, role))
    if is_resident:
        size, kind = sizes.tag, f"weights/{tag}"
        return Holding(role, kind, "backuper", note=note, train_bytes=size, forward_bytes=size, asleep_bytes=size)
    return Holding(
        role,
        f"weights/{tag}",
        "backuper",
        note=note,
        host_awake_bytes=sizes.tag_share,
        host_asleep_bytes=sizes.tag_share,
    )


def awake_for_forward(plan: Plan, row: PlanRow) -> bool:
    """Rebuilding reads main params; if the saver keeps the optimizer state, that wakes the whole of it."""
    if row.kind == "optim":
        reads_optim = plan.row(row.role, "param").keeper == "main_params" and row.keeper not in OWN_KEEPERS
        return reads_optim or not plan.sleeps
    return row.kind in ("param", "rest") or not plan.sleeps
