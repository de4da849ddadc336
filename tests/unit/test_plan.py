"""The plan: which keeper each policy gives, and the proof that every byte that sleeps comes back."""

import dataclasses
import itertools

import pytest

from tests.helpers.composing import config_of
from trainer.config import rules
from trainer.config.schema import RestoreConfig
from trainer.plan import KINDS, Plan, PlanRow, make_plan

# policy -> role -> (param keeper, param flag, grad keeper, grad flag, rest keeper), as DESIGN's table has them
POLICIES = {
    "full": {
        "actor": ("saver", False, "saver", False, "backuper"),
        "critic": ("saver", False, "saver", False, "saver"),
    },
    "no_grads": {
        "actor": ("saver", False, "none", True, "backuper"),
        "critic": ("saver", False, "none", True, "saver"),
    },
    "lean": {
        "actor": ("backuper", True, "none", True, "backuper"),
        "critic": ("saver", False, "none", True, "saver"),
    },
    "rebuild": {
        "actor": ("main_params", True, "none", True, "saver"),
        "critic": ("main_params", True, "none", True, "saver"),
    },
}
ROLES = ("actor", "critic")


def seen(plan: Plan, role: str) -> tuple:
    param, grad, rest = (plan.row(role, kind) for kind in ("param", "grad", "rest"))
    return param.keeper, param.flag, grad.keeper, grad.flag, rest.keeper


@pytest.mark.parametrize(
    "offload", [("offload=train",), ("offload.train=true",), ("offload=none", "offload.train=true")]
)
@pytest.mark.parametrize("policy", POLICIES)
def test_keepers_and_flags_of_the_policies(policy, offload):
    """The same however offload came to be on."""
    config = config_of(f"memory={policy}", *offload)
    plan = make_plan(config)
    assert plan.sleeps
    for role in ROLES:
        assert seen(plan, role) == POLICIES[policy][role]
        param, grad, optim, rest = plan.of_role(role)
        assert (param.kind, grad.kind, optim.kind, rest.kind) == KINDS
        assert (param.saver_backup, grad.saver_backup) == (not param.flag, not grad.flag)
        assert optim.keeper in ("saver", "arena")
        assert (optim.saver_backup, optim.flag) == (optim.keeper == "saver", None)
        assert (rest.saver_backup, rest.flag) == (rest.keeper == "saver", None)


@pytest.mark.parametrize("policy", POLICIES)
def test_nothing_sleeps_without_offload(policy):
    plan = make_plan(config_of(f"memory={policy}", "offload=none"))
    assert not plan.sleeps
    assert {row.keeper for row in plan.rows} == {"awake"}
    assert not any(row.saver_backup for row in plan.rows)
    assert {row.flag for row in plan.rows if row.kind in ("param", "grad")} == {False}


@pytest.mark.parametrize("policy", ["full", "no_grads", "lean"])
@pytest.mark.parametrize("role", ROLES)
def test_the_param_flag_is_not_applicable_without_the_distributed_optimizer(policy, role):
    plan = make_plan(config_of(f"memory={policy}", f"roles.{role}.ddp.use_distributed_optimizer=false"))
    param, rest = plan.row(role, "param"), plan.row(role, "rest")
    assert (param.keeper, param.flag, param.saver_backup) == ("-", None, False)
    assert rest.keeper == ("backuper" if role == "actor" else "saver")
    assert "all parameters" in rest.note
    assert plan.row(role, "grad").flag is (policy != "full")


@pytest.mark.parametrize(
    ("policy", "role", "kind", "note"),
    [
        ("lean", "actor", "param", "redundant: the saver keeps a copy too, backuper restores"),
        ("rebuild", "actor", "param", "redundant: the saver keeps a copy too, main_params restores"),
        ("rebuild", "critic", "param", "redundant: the saver keeps a copy too, main_params restores"),
        ("lean", "actor", "grad", "redundant: the saver copies what is zeroed before every use"),
        ("no_grads", "critic", "grad", "redundant: the saver copies what is zeroed before every use"),
    ],
)
def test_an_unset_flag_beside_another_source_is_shown_as_overhead(policy, role, kind, note):
    row = make_plan(config_of(f"memory={policy}", f"roles.{role}.ddp.disable_{kind}_buffers_cpu_backup=false")).row(
        role, kind
    )
    assert (row.flag, row.saver_backup, row.note) == (False, True, note)
    assert row.keeper == POLICIES[policy][role][0 if kind == "param" else 2]


def test_the_second_copy_of_the_actor_is_noted():
    plan = make_plan(config_of("memory=full"))
    assert plan.row("actor", "param").note == "the weights backuper keeps a copy too"
    assert plan.row("critic", "param").note == ""


@pytest.mark.parametrize("role", ROLES)
def test_every_sleeping_byte_has_a_source_in_every_valid_config(role):
    config, valid = config_of(), 0
    for params, grads, optimizer, param_flag, grad_flag, distributed in itertools.product(
        ("saver", "backuper", "main_params"), ("saver", "none"), ("saver", "arena"), *[(False, True)] * 3
    ):
        restore = RestoreConfig(restore_params_from=params, restore_grads_from=grads, optim_keeper=optimizer)
        ddp = dataclasses.replace(
            config.roles[role].ddp,
            disable_param_buffers_cpu_backup=param_flag,
            disable_grad_buffers_cpu_backup=grad_flag,
            use_distributed_optimizer=distributed,
        )
        changed = dataclasses.replace(
            config,
            memory=dataclasses.replace(config.memory, roles={**config.memory.roles, role: restore}),
            roles={**config.roles, role: dataclasses.replace(config.roles[role], ddp=ddp)},
        )
        try:
            rules.check(changed, explicit_flags=())
        except ValueError:
            continue
        valid += 1
        for row in make_plan(changed).of_role(role):
            zeroed = (row.kind, row.keeper) == ("grad", "none")
            assert row.saver_backup or zeroed or row.keeper in ("backuper", "main_params", "arena", "-"), row
    # Of (source, flag) 5 pairs for parameters with the distributed optimizer, 4 without; the critic has no backuper:
    # 3 and 2. 3 pairs for gradients, 2 optimizer keepers.
    assert valid == ((5 + 4) if role == "actor" else (3 + 2)) * 3 * 2


@pytest.mark.parametrize(
    "row",
    [
        PlanRow("critic", "param", "saver", saver_backup=False, flag=True),
        PlanRow("critic", "param", "none", saver_backup=False, flag=True),
        PlanRow("actor", "optim", "none", saver_backup=False, flag=None),
        PlanRow("actor", "grad", "saver", saver_backup=False, flag=True),
        PlanRow("actor", "rest", "awake", saver_backup=False, flag=None),
    ],
)
def test_a_row_that_would_wake_with_garbage_is_refused(row):
    with pytest.raises(AssertionError, match=f"{row.tag} has no source to come back from"):
        Plan(True, (row,))
    assert Plan(False, (row,)).rows == (row,)
