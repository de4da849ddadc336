"""Who keeps which bytes while a model sleeps: the plan that follows from the config, proven before anything starts.

Pure: imports neither torch nor megatron. The rows say, per role and buffer kind, the keeper, whether the saver keeps
a copy, and what the flag is.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from trainer.config.roles import RoleSpec, role_specs, trained_role
from trainer.config.schema import GRAD_FLAG, PARAM_FLAG, Config, DdpConfig
from trainer.plan.keepers import OWN_KEEPERS

KINDS = ("param", "grad", "optim", "rest")
NO_BUFFER = "-"  # keeper of a kind that does not exist in this run


@dataclass(frozen=True)
class PlanRow:
    """One role's buffers of one kind.

    Attributes:
        keeper: who the bytes come back from: saver, backuper, main_params, one of :data:`OWN_KEEPERS`, none; ``awake``
            if nothing sleeps, ``-`` if there is no such buffer.
        saver_backup: the saver copies the region to host memory.
        flag: value of the kind's ``disable_*_cpu_backup`` flag; None where it does not apply.
        note: what a reader of the table should know.
    """

    role: str
    kind: str
    keeper: str
    saver_backup: bool
    flag: bool | None
    note: str = ""

    @property
    def tag(self) -> str:
        return f"{self.role}/{self.kind}"


@dataclass(frozen=True)
class Plan:
    """All rows of a run. Raises AssertionError if a paused byte would have no source to come back from."""

    sleeps: bool
    rows: tuple[PlanRow, ...]

    def __post_init__(self) -> None:
        for row in self.rows:
            restored = row.saver_backup or row.keeper in ("backuper", "main_params", *OWN_KEEPERS, NO_BUFFER)
            zeroed_before_use = row.kind == "grad" and row.keeper == "none"
            assert not self.sleeps or restored or zeroed_before_use, f"{row.tag} has no source to come back from"

    def row(self, role: str, kind: str) -> PlanRow:
        return next(row for row in self.rows if (row.role, row.kind) == (role, kind))

    def of_role(self, role: str) -> tuple[PlanRow, ...]:
        return tuple(row for row in self.rows if row.role == role)


def weights_kind(plan: Plan, role: str) -> str:
    """The buffer kind in which most of a role's parameters lie."""
    return "rest" if plan.row(role, "param").keeper == NO_BUFFER else "param"


def make_plan(config: Config) -> Plan:
    """The plan of a validated config."""
    sleeps = config.offload.train
    rows = []
    for role, spec in role_specs(config).items():
        restore = config.memory.roles[role]
        if not spec.is_trained:
            rows += _frozen_rows(spec, restore.restore_params_from, sleeps=sleeps)
            continue
        ddp = trained_role(config, role).ddp
        rows += [
            _param_row(spec, ddp, restore.restore_params_from, sleeps=sleeps),
            _grad_row(role, ddp, restore.restore_grads_from, sleeps=sleeps),
            _optim_row(role, restore.optim_keeper, config.memory.optim_format, sleeps=sleeps),
            _rest_row(spec, ddp, restore.restore_params_from, sleeps=sleeps),
        ]
    return Plan(sleeps, tuple(rows))


def _frozen_rows(spec: RoleSpec, source: str, *, sleeps: bool) -> Iterator[PlanRow]:
    for kind in ("param", "grad", "optim"):
        yield PlanRow(spec.name, kind, NO_BUFFER, False, None, "not trained")
    yield PlanRow(spec.name, "rest", _or_awake(source, sleeps), sleeps and source == "saver", None, "all parameters")


def _or_awake(keeper: str, sleeps: bool) -> str:
    return keeper if sleeps else "awake"


def _param_row(spec: RoleSpec, ddp: DdpConfig, source: str, *, sleeps: bool) -> PlanRow:
    if not ddp.use_distributed_optimizer:
        # The buffer does not exist: parameters are `rest`.
        return PlanRow(spec.name, "param", NO_BUFFER, False, None, "no buffer: parameters are in rest")
    flag = getattr(ddp, PARAM_FLAG)
    copied = sleeps and not flag
    note = ""
    if copied and source != "saver":
        note = f"redundant: the saver keeps a copy too, {source} restores"
    elif copied and spec.has_backuper:
        note = "the weights backuper keeps a copy too"
    return PlanRow(spec.name, "param", _or_awake(source, sleeps), copied, flag, note)


def _grad_row(role: str, ddp: DdpConfig, source: str, *, sleeps: bool) -> PlanRow:
    flag = getattr(ddp, GRAD_FLAG)
    copied = sleeps and not flag
    note = "zeroed before every use"
    if copied and source == "none":
        note = "redundant: the saver copies what is zeroed before every use"
    return PlanRow(role, "grad", _or_awake(source, sleeps), copied, flag, note)


def _optim_row(role: str, keeper: str, optim_format: str, *, sleeps: bool) -> PlanRow:
    note = "fp32 main params and Adam moments"
    if sleeps and optim_format == "bf16":
        note += ", these in bf16 while they sleep"
    if sleeps and keeper == "packed":
        note += "; at most so many bytes"
    return PlanRow(role, "optim", _or_awake(keeper, sleeps), sleeps and keeper == "saver", None, note)


def _rest_row(spec: RoleSpec, ddp: DdpConfig, source: str, *, sleeps: bool) -> PlanRow:
    # Where parameters are rebuilt from main params the backuper keeps no tag of the role's own to restore `rest` from.
    keeper = "backuper" if spec.has_backuper and source != "main_params" else "saver"
    what = "buffers, frozen parameters"
    if not ddp.use_distributed_optimizer:
        what = "all parameters, buffers"
    return PlanRow(spec.name, "rest", _or_awake(keeper, sleeps), sleeps and keeper == "saver", None, what)
