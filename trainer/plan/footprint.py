"""How many bytes the plan comes to: device and host, awake and asleep, per rank and per node, with nothing built.

Counted are parameters, gradients, optimizer state, weights tags and the rollout engine's weights, as tensors lie in
their buffers. Not counted, because no config says: activations, the KV cache, CUDA context, kernels, communicators,
the allocator's rounding to 2 MiB segments, and the one tensor at a time that a weight sync gathers from ranks. All
workers run on one node. Pipeline stages differ (the first has the embedding, the last the head): a rank's numbers are
those of the stage that needs most, the node's are the sums of all.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from trainer.config import Config
from trainer.plan import NO_BUFFER, Plan, PlanRow, make_plan
from trainer.plan.layout import (
    ALIGNMENT_BYTES,
    ITEM_BYTES,
    WHOLE,
    BufferLayout,
    Parameter,
    buffer_layouts,
    default_bucket_size,
    optimizer_elements,
    parameters,
    rotary_table_bytes,
    round_up,
)

ENGINE = "engine"


@dataclass(frozen=True)
class RoleBytes:
    """One role on one rank, before anybody decides who keeps what.

    Attributes:
        kinds: buffer kind of :mod:`trainer.plan` -> device bytes while awake.
        main_params: the part of ``optim`` that holds main params.
        tag: host bytes of one weights tag.
    """

    parameter_count: int
    kinds: dict[str, int]
    main_params: int
    tag: int


@dataclass(frozen=True)
class Holding:
    """Bytes per rank of one buffer kind (or weights tag, ``weights/<tag>``) of one role (or the engine).

    Device bytes while the role trains, does forward passes with its own weights, and sleeps; host bytes while it is
    awake (what stays page-locked between sleeps) and asleep.
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

    def device_bytes(self, state: str) -> int:
        """``state``: train, forward, asleep, or absent (not built yet)."""
        return 0 if state == "absent" else getattr(self, f"{state}_bytes")

    def host_bytes(self, state: str) -> int:
        awake = 0 if state == "absent" else self.host_awake_bytes
        return self.host_asleep_bytes if state == "asleep" else awake


@dataclass(frozen=True)
class Moment:
    """A stretch of the run and the bytes per rank at its peak."""

    name: str
    device_bytes: int
    host_bytes: int


@dataclass(frozen=True)
class Footprint:
    """Everything that one rank of a run holds, and the ``ranks`` ranks of the node together.

    Attributes:
        host_is_device: the platform is the CPU, so what lies "on the device" lies in host memory too.
        parameter_counts: role -> parameters on this rank, to which the holdings belong.
        node_moments: the moments with the bytes of all ranks.
        node_host_asleep: role -> host bytes asleep, of all ranks.
    """

    ranks: int
    host_is_device: bool
    parameter_counts: dict[str, int]
    holdings: tuple[Holding, ...]
    moments: tuple[Moment, ...]
    node_moments: tuple[Moment, ...]
    node_host_asleep: dict[str, int]

    def of_role(self, role: str) -> tuple[Holding, ...]:
        return tuple(holding for holding in self.holdings if holding.role == role)

    def host_asleep_bytes(self, role: str) -> int:
        """Of one rank."""
        return sum(holding.host_asleep_bytes for holding in self.of_role(role))

    @property
    def device_peak_bytes(self) -> int:
        """Of one rank."""
        return max(moment.device_bytes for moment in self.moments)

    @property
    def node_host_peak_bytes(self) -> int:
        """Of all ranks together."""
        return max(m.host_bytes + self.host_is_device * m.device_bytes for m in self.node_moments)


def footprint(config: Config, *, vocab_size: int, stage: int | None = None) -> Footprint:
    """The bytes of a validated config.

    Args:
        vocab_size: entries of the run's tokenizer.
        stage: a pipeline stage, whose ranks are meant; None: the one with the highest peaks.
    """
    plan, stages = make_plan(config), range(config.parallel.pp)
    roles = [
        {role: role_bytes(config, role, vocab_size=vocab_size, stage=number) for role in config.roles}
        for number in stages
    ]
    holdings = [[*_holdings(config, plan, sizes), _engine_holding(config, vocab_size=vocab_size)] for sizes in roles]
    moments = [tuple(_moments(config, plan, holdings[number], roles[number])) for number in stages]
    if stage is None:
        stage = max(stages, key=lambda number: _peaks(moments[number]))
    ranks_per_stage = config.launch.nproc // config.parallel.pp
    return Footprint(
        ranks=config.launch.nproc,
        host_is_device=config.platform.name == "cpu",
        parameter_counts={role: sizes.parameter_count for role, sizes in roles[stage].items()},
        holdings=tuple(holdings[stage]),
        moments=moments[stage],
        node_moments=tuple(_summed(same, times=ranks_per_stage) for same in zip(*moments, strict=True)),
        node_host_asleep={
            role: ranks_per_stage * sum(h.host_asleep_bytes for held in holdings for h in held if h.role == role)
            for role in config.roles
        },
    )


def _peaks(moments: tuple[Moment, ...]) -> tuple[int, int]:
    return max(moment.device_bytes for moment in moments), max(moment.host_bytes for moment in moments)


def _summed(moments: tuple[Moment, ...], *, times: int) -> Moment:
    device, host = (times * sum(getattr(m, name) for m in moments) for name in ("device_bytes", "host_bytes"))
    return Moment(moments[0].name, device, host)


def model_parameters(config: Config, *, vocab_size: int) -> dict[str, int]:
    """Role -> parameters of the whole model, each counted once."""
    return {
        name: sum(
            parameter.size
            for parameter in parameters(role.model, vocab_size=vocab_size, value_head=name == "critic", parallel=WHOLE)
        )
        for name, role in config.roles.items()
    }


def role_bytes(
    config: Config, role: str, *, vocab_size: int, stage: int = 0, bucket_size: int | None = None
) -> RoleBytes:
    """Sizes of one role's buffers on the largest data-parallel rank of a pipeline stage. ``bucket_size`` in elements
    replaces Megatron's default."""
    ddp, model, parallel = config.roles[role].ddp, config.roles[role].model, config.parallel
    data_parallel = config.data_parallel_size
    chunks = [
        parameters(
            model, vocab_size=vocab_size, value_head=role == "critic", parallel=parallel, stage=stage, chunk=chunk
        )
        for chunk in range(parallel.vpp)
    ]
    layouts = [
        buffer
        for found in chunks
        for buffer in buffer_layouts(
            found,
            ddp=ddp,
            data_parallel=data_parallel,
            bucket_size=bucket_size or default_bucket_size(ddp, data_parallel=data_parallel),
        ).items()
    ]
    optimizer, main_params = optimizer_elements(
        layouts, distributed_optimizer=ddp.use_distributed_optimizer, data_parallel=data_parallel
    )
    found = tuple(parameter for chunk in chunks for parameter in chunk)
    table = rotary_table_bytes(model)
    return RoleBytes(
        parameter_count=sum(parameter.size for parameter in found),
        kinds=_kinds(found, layouts, distributed_optimizer=ddp.use_distributed_optimizer, table=table)
        | {"optim": optimizer * ITEM_BYTES["fp32"]},
        main_params=main_params * ITEM_BYTES["fp32"],
        tag=sum(round_up(size, ALIGNMENT_BYTES) for size in (table, *(p.size_bytes for p in found))),
    )


def _kinds(
    found: tuple[Parameter, ...],
    layouts: list[tuple[str, BufferLayout]],
    *,
    distributed_optimizer: bool,
    table: int,
) -> dict[str, int]:
    buffers = sum(layout.size * ITEM_BYTES[dtype] for dtype, layout in layouts)
    return {
        "param": buffers if distributed_optimizer else 0,
        "grad": sum(layout.size for _, layout in layouts) * ITEM_BYTES["fp32"],
        "rest": table + (0 if distributed_optimizer else sum(parameter.size_bytes for parameter in found)),
    }


def _holdings(config: Config, plan: Plan, roles: dict[str, RoleBytes]) -> Iterator[Holding]:
    for role, sizes in roles.items():
        yield from _role_holdings(config, plan, role, sizes)


def _role_holdings(config: Config, plan: Plan, role: str, sizes: RoleBytes) -> Iterator[Holding]:
    keeps_own_tag = role == "actor" and plan.row(role, "param").keeper != "main_params"
    own_tag_kind = "param" if config.roles[role].ddp.use_distributed_optimizer else "rest"
    own_tag_restores = plan.row(role, own_tag_kind).keeper == "backuper"
    retains = config.platform.name == "cuda" and config.memory.retain_cpu_backup
    for row in plan.of_role(role):
        if row.keeper == NO_BUFFER:
            continue
        size = sizes.kinds[row.kind]
        copy = size if row.saver_backup else 0
        lasting = sizes.tag if own_tag_restores and row.kind == own_tag_kind else 0
        if row.keeper == "arena":
            lasting += round_up(size, ALIGNMENT_BYTES)
        yield Holding(
            role,
            row.kind,
            row.keeper,
            row.flag,
            row.note,
            train_bytes=size,
            forward_bytes=size if _awake_for_forward(plan, row) else 0,
            asleep_bytes=0 if plan.sleeps else size,
            host_awake_bytes=lasting + (copy if retains else 0),
            host_asleep_bytes=lasting + copy,
        )
    if keeps_own_tag and not own_tag_restores:
        yield _tag_holding(role, role, sizes)
    if role == "actor":
        yield _tag_holding(role, "ref", sizes)


def _tag_holding(role: str, tag: str, sizes: RoleBytes) -> Holding:
    note = "the reference model" if tag == "ref" else "kept for switching back from other tags"
    return Holding(
        role, f"weights/{tag}", "backuper", note=note, host_awake_bytes=sizes.tag, host_asleep_bytes=sizes.tag
    )


def _awake_for_forward(plan: Plan, row: PlanRow) -> bool:
    """Rebuilding reads main params; without an arena of the optimizer state that wakes the whole of it."""
    if row.kind == "optim":
        reads_optim = plan.row(row.role, "param").keeper == "main_params" and row.keeper != "arena"
        return reads_optim or not plan.sleeps
    return row.kind in ("param", "rest") or not plan.sleeps


def _engine_holding(config: Config, *, vocab_size: int) -> Holding:
    """transformers' model: the actor's parameters, all of them, and the rotary table, which it keeps twice."""
    model = config.roles["actor"].model
    found = parameters(model, vocab_size=vocab_size, value_head=False, parallel=WHOLE)
    size = sum(parameter.size_bytes for parameter in found) + 2 * rotary_table_bytes(model)
    return Holding(
        ENGINE,
        "weights",
        "none",
        note="synced from the actor every step",
        train_bytes=size,
        forward_bytes=size,
        asleep_bytes=0 if config.offload.train else size,
    )


def _moments(config: Config, plan: Plan, holdings: list[Holding], roles: dict[str, RoleBytes]) -> Iterator[Moment]:
    def moment(name: str, states: dict[str, str], *, transient: int = 0) -> Moment:
        state_of = {**dict.fromkeys((*roles, ENGINE), "asleep"), **states}
        device = sum(holding.device_bytes(state_of[holding.role]) for holding in holdings)
        return Moment(name, device + transient, sum(holding.host_bytes(state_of[holding.role]) for holding in holdings))

    absent = dict.fromkeys((*roles, ENGINE), "absent")
    for role, sizes in roles.items():
        clones = sizes.main_params if config.roles[role].model.dtype != "fp32" else 0
        yield moment(f"build {role}", {**absent, role: "train"}, transient=clones)
        del absent[role]
    yield moment("rollout", {ENGINE: "forward"})
    yield moment("sync engine", {"actor": "forward", ENGINE: "forward"})
    for role, sizes in roles.items():
        rebuilds = plan.row(role, "param").keeper == "main_params" and plan.row(role, "optim").keeper == "arena"
        if rebuilds and config.platform.name == "cuda":  # main params go to the device once more, to be read there
            yield moment(f"rebuild {role}", {role: "forward"}, transient=sizes.main_params)
        yield moment(f"{role} forward", {role: "forward"})
    for role in roles:
        yield moment(f"train {role}", {role: "train"})
    yield moment("all asleep", {})


def plan_rows(prediction: Footprint) -> list[dict[str, Any]]:
    """Plain rows for the tables of a run and its report."""
    return [
        {
            "role": holding.role,
            "kind": holding.kind,
            "keeper": holding.keeper,
            "flag": holding.flag,
            "note": holding.note,
            "released_bytes": holding.train_bytes - holding.asleep_bytes,
            "backup_bytes": holding.host_asleep_bytes,
        }
        for holding in prediction.holdings
    ]
