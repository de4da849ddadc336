"""How many bytes the plan comes to: device and host, awake and asleep, per rank and per node, with nothing built.

Counted are parameters, gradients, optimizer state, weights tags and what the rollout engine holds, as tensors lie in
their buffers; activations are estimated (:mod:`trainer.plan.activations`). Not counted, because no config says: CUDA
context, kernels, communicators, the allocator's rounding to 2 MiB segments, and the one tensor at a time that a weight
sync gathers from ranks. Pipeline
stages differ (the first has the embedding, the last the head): a rank's numbers are those of the stage that needs most,
a node's are the sums over its ranks, on the node that needs most.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from trainer.config.roles import role_spec, trained_roles
from trainer.config.schema import Config
from trainer.plan import Plan, activations, make_plan
from trainer.plan.holdings import ENGINE, EngineBytes, Holding, awake_for_forward, backed_up_tags, role_holdings
from trainer.plan.keepers import OWN_KEEPERS
from trainer.plan.role_bytes import RoleBytes, role_bytes
from trainer.plan.schedule import Schedule
from trainer.plan.step_schedule import make_schedule, room_bytes


@dataclass(frozen=True)
class Moment:
    """A stretch of the run and the bytes per rank at its peak; ``activation_bytes`` are beside ``device_bytes``."""

    name: str
    device_bytes: int
    host_bytes: int
    activation_bytes: int = 0


@dataclass(frozen=True)
class Footprint:
    """Everything that one rank of a run holds, and the ``ranks`` ranks of the node together.

    Attributes:
        host_is_device: the platform is the CPU, so what lies "on the device" lies in host memory too.
        parameter_counts: role -> parameters on this rank, to which the holdings belong.
        node_moments: the moments with the bytes of all ranks.
        node_host_asleep: role -> host bytes asleep, of all ranks.
        node_checkpoint_bytes: host bytes, on the node, of a checkpoint that is written while the run goes on.
        node_disk_bytes: of the files in which all ranks' optimizer states sleep.
        schedule: of the rank, None where everything sleeps that is not at work.
        refusal: why there is none although ``offload=auto``.
    """

    ranks: int
    host_is_device: bool
    parameter_counts: dict[str, int]
    holdings: tuple[Holding, ...]
    moments: tuple[Moment, ...]
    node_moments: tuple[Moment, ...]
    node_host_asleep: dict[str, int]
    node_checkpoint_bytes: int
    node_disk_bytes: int
    schedule: Schedule | None = None
    refusal: str | None = None

    def of_role(self, role: str) -> tuple[Holding, ...]:
        return tuple(holding for holding in self.holdings if holding.role == role)

    def host_asleep_bytes(self, role: str) -> int:
        """Of one rank."""
        return sum(holding.host_asleep_bytes for holding in self.of_role(role))

    @property
    def device_peak_bytes(self) -> int:
        """Of one rank, with activations."""
        return max(moment.device_bytes + moment.activation_bytes for moment in self.moments)

    @property
    def node_host_peak_bytes(self) -> int:
        """Of all ranks together."""
        peak = max(m.host_bytes + self.host_is_device * m.device_bytes for m in self.node_moments)
        return peak + self.node_checkpoint_bytes


def footprint(
    config: Config,
    *,
    vocab_size: int,
    engine: EngineBytes,
    stage: int | None = None,
    reported_gpu_bytes: int | None = None,
) -> Footprint:
    """The bytes of a validated config.

    Args:
        reported_gpu_bytes: memory of a GPU, for the schedule, where ``launch.gpu_memory_gib`` is null; None: no limit.
        vocab_size: entries of the run's tokenizer.
        engine: what the rollout engine holds.
        stage: a pipeline stage, whose ranks are meant; None: the one with the highest peaks.
    """
    plan, stages = make_plan(config), range(config.parallel.pp)
    roles = [
        {role: role_bytes(config, role, vocab_size=vocab_size, stage=number) for role in config.roles}
        for number in stages
    ]
    room = room_bytes(config, reported_gpu_bytes)
    schedules, refusal = [], None
    for number in stages:
        try:
            found = make_schedule(config, vocab_size=vocab_size, engine=engine, room=room, stage=number)
        except ValueError as error:
            found, refusal = None, str(error)
        schedules.append(found)
    holdings = [
        [*_holdings(config, plan, sizes, schedules[number]), *engine.holdings] for number, sizes in enumerate(roles)
    ]
    moments = [
        tuple(
            replace(moment, activation_bytes=_activation_bytes(config, moment.name, vocab_size, number))
            for moment in _moments(
                config, plan, holdings[number], roles[number], engine=engine, schedule=schedules[number]
            )
        )
        for number in stages
    ]
    if stage is None:
        stage = max(stages, key=lambda number: _peaks(moments[number]))
    nodes = {tuple(of_ranks): _summed(moments[number] for number in of_ranks) for of_ranks in _nodes(config)}
    node, node_moments = max(nodes.items(), key=lambda item: _peaks(item[1]))
    return Footprint(
        ranks=config.launch.nproc,
        host_is_device=config.platform.name == "cpu",
        parameter_counts={role: sizes.parameter_count for role, sizes in roles[stage].items()},
        holdings=tuple(holdings[stage]),
        moments=moments[stage],
        node_moments=node_moments,
        node_host_asleep={
            role: sum(h.host_asleep_bytes for number in node for h in holdings[number] if h.role == role)
            for role in config.roles
        },
        node_checkpoint_bytes=_checkpoint_bytes(config, [roles[number] for number in node]),
        node_disk_bytes=sum(h.disk_bytes for number in node for h in holdings[number]),
        schedule=schedules[stage],
        refusal=refusal,
    )


def _nodes(config: Config) -> list[list[int]]:
    """The pipeline stages of each node's ranks; ranks of a stage follow each other."""
    ranks, on_node = config.world_size, config.launch.nproc
    stages = [rank * config.parallel.pp // ranks for rank in range(ranks)]
    return [stages[start : start + on_node] for start in range(0, ranks, on_node)]


def _peaks(moments: tuple[Moment, ...]) -> tuple[int, int]:
    return max(moment.device_bytes for moment in moments), max(moment.host_bytes for moment in moments)


def _summed(moments: Iterable[tuple[Moment, ...]]) -> tuple[Moment, ...]:
    """Of several ranks, moment by moment."""
    return tuple(
        Moment(
            same[0].name,
            *(sum(getattr(m, field) for m in same) for field in ("device_bytes", "host_bytes", "activation_bytes")),
        )
        for same in zip(*moments, strict=True)
    )


def _checkpoint_bytes(config: Config, ranks: list[dict[str, RoleBytes]]) -> int:
    """The copies of ``checkpoint.async_save`` of a node's ``ranks``: every rank's shares of the optimizer state, and
    once, whichever rank has it to write, what data-parallel ranks hold alike: the weights of the parts of the model
    that are on the node, the reference's too, and the state of an optimizer that is not distributed."""
    if config.checkpoint.every_steps is None or not config.checkpoint.async_save:
        return 0
    size = 0
    trained = trained_roles(config)
    is_distributed = {role: settings.ddp.use_distributed_optimizer for role, settings in trained.items()}
    for roles in ranks:
        size += sum(roles[role].kinds["optim"] for role in trained if is_distributed[role])
    for roles in {id(roles): roles for roles in ranks}.values():  # of each pipeline stage
        for role in trained:
            state = 0 if is_distributed[role] else roles[role].stage_optim
            size += roles[role].stage_weights * (1 + len(role_spec(config, role).tags or ())) + state
    return size


def _activation_bytes(config: Config, moment: str, vocab_size: int, stage: int) -> int:
    """Of the passes of a moment that :func:`_moments` names after a role."""
    sizes = {"tokens": activations.micro_batch_tokens(config), "vocab_size": vocab_size, "stage": stage}
    match moment.split():
        case ["train", role]:
            return activations.training_bytes(config, role, **sizes)
        case [role, "forward"]:
            return activations.forward_bytes(config, role, **sizes)
    return 0


def _holdings(config: Config, plan: Plan, roles: dict[str, RoleBytes], schedule: Schedule | None) -> Iterator[Holding]:
    for role, sizes in roles.items():
        yield from role_holdings(config, plan, role, sizes, schedule=schedule)


def _moments(
    config: Config,
    plan: Plan,
    holdings: list[Holding],
    roles: dict[str, RoleBytes],
    *,
    engine: EngineBytes,
    schedule: Schedule | None,
) -> Iterator[Moment]:
    def moment(name: str, states: dict[str, str], *, transient: int = 0, host_transient: int = 0) -> Moment:
        state_of = {**dict.fromkeys((*roles, ENGINE), "asleep"), **states}
        device = sum(holding.device_bytes(state_of[holding.role]) for holding in holdings)
        host = sum(holding.host_bytes(state_of[holding.role]) for holding in holdings)
        return Moment(name, device + transient, host + host_transient)

    absent = dict.fromkeys((*roles, ENGINE), "absent")
    for role, sizes in roles.items():
        clones = sizes.main_params if config.roles[role].model.dtype != "fp32" else 0
        yield moment(f"build {role}", {**absent, role: "train"}, transient=clones)
        del absent[role]
    if schedule is not None and plan.sleeps:
        host = sum(holding.host_asleep_bytes for holding in holdings)
        for phase in schedule.phases:
            yield Moment(phase.name.replace("train_", "train "), schedule.awake_bytes(phase.name), host)
        yield from _saving_moments(config, plan, roles, moment)
        return
    with_actor = {"actor": "forward", ENGINE: "forward"}
    yield moment("rollout", {ENGINE: "forward"} if engine.has_own_weights else with_actor)
    if engine.has_own_weights:
        yield moment("sync engine", with_actor)
    for role, sizes in roles.items():
        rebuilds = plan.row(role, "param").keeper == "main_params" and plan.row(role, "optim").keeper in OWN_KEEPERS
        if rebuilds:  # main params go to the device once more, to be read there
            yield moment(f"rebuild {role}", {role: "forward"}, transient=sizes.main_params)
        yield moment(f"{role} forward", {role: "forward"})
    for role in trained_roles(config):
        yield moment(f"train {role}", {role: "train"})
    if config.critic_starts_from_actor:
        copied = 0 if backed_up_tags(plan, role_spec(config, "actor")) else roles["actor"].weights
        yield moment("start critic from actor", {"critic": "train"}, host_transient=copied)
    yield from _saving_moments(config, plan, roles, moment)
    yield moment("all asleep", {})


def _saving_moments(
    config: Config, plan: Plan, roles: dict[str, RoleBytes], moment: Callable[..., Moment]
) -> Iterator[Moment]:
    if config.checkpoint.every_steps is not None:
        for role in trained_roles(config):
            state, woken, copies = _saving(config, plan, role, roles[role])
            yield moment(f"save {role}", {role: state}, transient=woken, host_transient=copies)


def _saving(config: Config, plan: Plan, role: str, sizes: RoleBytes) -> tuple[str, int, int]:
    """What a role is while it is saved, the device bytes of what wakes up beyond that, and the host bytes of copies
    that are made to write them, which live until the rank's file is written: what host memory holds already is written
    from there."""
    optim_row = plan.row(role, "optim")
    has_own_tag = plan.sleeps and role in backed_up_tags(plan, role_spec(config, role))
    weights = 0 if has_own_tag else sizes.weights
    is_readable = optim_row.keeper == "arena" and config.memory.optim_format == "fp32"
    optim = 0 if is_readable else sizes.kinds["optim"]
    state = "forward" if weights and plan.sleeps else "asleep"
    is_awake_then = not plan.sleeps or (state == "forward" and awake_for_forward(plan, optim_row))
    is_copied = config.platform.name == "cuda" and not config.checkpoint.async_save  # whose copy counts on the node
    return state, 0 if is_awake_then else optim, weights + optim if is_copied else 0


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
