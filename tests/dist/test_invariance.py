"""The heart: sleeping must not change a single bit of what a run computes."""

import functools
import json
import math
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.composing import SMALL
from tests.helpers.invariance import CASES, KEEPERS, numbers, run_cases, scheduled_cases
from tests.helpers.recording import lasting
from trainer.command.launch import WorkerError

OTHERS = {
    "plain optimizer": (
        "roles.actor.ddp.use_distributed_optimizer=false",
        "roles.critic.ddp.use_distributed_optimizer=false",
    ),
    "overlap, recomputed and packed": (
        *("roles.actor.ddp.overlap_grad_reduce=true", "roles.actor.ddp.overlap_param_gather=true"),
        *("training.recompute=full", "training.packing=true", "algo.micro_batch_tokens=64"),
    ),
    "fp32 and tied": (
        *("model.dtype=fp32", "model.tie_embeddings=true", "model.qk_norm=true", "training.recompute=selective"),
    ),
}
FINER = ("algo.micro_batch_size=2",)


def shared_tags(**cases):
    """The weights of the reference, and the actor's, are all-gathered, or come from one copy of the node."""
    shared = {
        f"{name}, {tags}": (*FINER, *case, f"memory.tags={tags}")
        for name, case in cases.items()
        for tags in ("sharded", "node")
    }
    return shared | {"none": (*FINER, *CASES["none"])}


def matrix(nproc):
    """What is tried -> its cases, all of which one group of workers runs."""
    tried = {"policies": CASES | scheduled_cases(nproc=nproc)}
    if nproc == 2:
        grpo = ("algo=grpo", "algo.responses_per_prompt=4")
        tried["without a critic"] = {name: (*grpo, *CASES[name]) for name in ("none", "lean", "rebuild")}
        for other, extra in OTHERS.items():
            tried[other] = {name: (*extra, *CASES[name]) for name in ("none", "full", "lean", "rebuild")}
        del tried["plain optimizer"]["rebuild"]
        tried["plain optimizer"]["node"] = (*OTHERS["plain optimizer"], *CASES["lean"], "memory.tags=node")
        auto = {name.replace(", ", " "): case for name, case in scheduled_cases(nproc=2).items() if "lean" in name}
        tried["shared tags"] = shared_tags(**{name: CASES[name] for name in ("lean", "full", "rebuild")}, **auto)
    return tried


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """results(nproc): what is tried -> the results of its cases."""

    @functools.cache
    def of(nproc):
        tried = matrix(nproc)
        cases = {(what, name): overrides for what, cases in tried.items() for name, overrides in cases.items()}
        found = run_cases(cases, nproc=nproc, log_dir=tmp_path_factory.mktemp("logs"))
        return {what: {name: found[what, name] for name in cases} for what, cases in tried.items()}

    return of


@pytest.mark.parametrize("nproc", [1, 2])
def test_every_policy_computes_the_bits_of_offload_none(nproc, results):
    found = results(nproc)["policies"]
    assert [name for name in CASES if not found[name]["slept"]] == ["none"]
    last = found["none"]["metrics"][-1]
    assert {"weights_sha256/actor", "weights_sha256/critic", "heldout_accuracy"} <= last.keys()
    assert all(math.isfinite(v) for v in last.values() if isinstance(v, float))
    assert last["weights_sha256/actor"] != found["none"]["metrics"][0].get("weights_sha256/actor")
    for name in CASES:
        assert numbers(found[name]) == numbers(found["none"]), name


def test_policies_compute_the_same_without_a_critic(results):
    found = results(2)["without a critic"]
    last = found["none"]["metrics"][-1]
    assert [name for name in last if name.startswith(("critic/", "weights_sha256/"))] == ["weights_sha256/actor"]
    for name in found:
        assert numbers(found[name]) == numbers(found["none"]), name


@pytest.mark.parametrize("other", OTHERS)
def test_other_optimizers_and_models_are_invariant_too(other, results):
    found = results(2)[other]
    assert len(found) >= 3
    for name in found:
        assert numbers(found[name]) == numbers(found["none"]), name


@pytest.mark.parametrize("nproc", [2, 4])
def test_tags_shared_by_the_ranks_restore_the_same_bits(nproc, results, tmp_path):
    """On four ranks through groups that are destroyed during rollouts, or of which two hold a model together."""
    if nproc == 4:
        tp = ("parallel.tp=2", *CASES["lean"])
        cases = shared_tags(lean=(*CASES["lean"], "offload.destroy_process_groups=true"), tp=tp)
        cases["tp"] = (*FINER, *CASES["none"], "parallel.tp=2")
        found = run_cases(cases, nproc=nproc, log_dir=tmp_path)
    else:
        found = results(nproc)["shared tags"]
    for name in found:
        base = "tp" if name.startswith("tp") else "none"
        assert found[name]["slept"] == (name not in ("none", "tp"))
        assert numbers(found[name]) == numbers(found[base]), name


def test_copies_that_come_as_late_as_they_may_change_nothing(tmp_path):
    """On a GPU an optimizer state comes back while the forward pass runs; nobody may read it before waiting for it."""
    cases = {name: CASES[name] for name in ("none", "lean", "rebuild")}
    scheduled = scheduled_cases(nproc=1)
    cases |= {name: scheduled[name] for name in scheduled if name.endswith("the largest phase")}
    results = run_cases(cases, nproc=1, log_dir=tmp_path, fault="late_copies")
    for name in cases:
        assert numbers(results[name]) == numbers(results["none"]), name


@pytest.mark.parametrize("nproc", [1, 2])
def test_whatever_the_schedule_lets_sleep_nothing_changes(nproc, results):
    found = results(nproc)["policies"]
    cases = scheduled_cases(nproc=nproc)
    for name, overrides in cases.items():
        room_bytes = float(overrides[-1].partition("=")[2]) * 2**30
        assert numbers(found[name]) == numbers(found["none"]), name
        assert 0 < found[name]["held_bytes"] <= room_bytes, name
        assert found[name]["notes"] == [], name
    for keeper in KEEPERS:
        moving = {name: set(found[name]["moving_phases"]) for name in cases if name.startswith(keeper)}
        assert moving[f"{keeper}, room for everything"] <= {"ref_log_probs", "log_probs"}, "it switches weights alone"
        phases = {"rollout", "ref_log_probs", "log_probs", "values", "train_critic", "train_actor"}
        assert phases <= moving[f"{keeper}, room for the largest phase"]


@pytest.mark.parametrize("nproc", [1, 2])
def test_a_pass_without_memory_is_repeated_once_others_have_made_room(nproc, results, tmp_path):
    """With two ranks one alone has no memory, in a pass of training before gradients are reduced."""
    cases = {name: case for name, case in scheduled_cases(nproc=nproc).items() if "everything" in name}
    base = results(nproc)["policies"]["none"]
    for name, found in run_cases(cases, nproc=nproc, log_dir=tmp_path, fault="out_of_memory").items():
        assert numbers(found) == numbers(base), name
        said = [note.partition(" ran out of GPU memory: ")[::2] for note in found["notes"]]
        assert [phase for phase, _ in said] == ["the phase values", "the phase train_critic"], name
        assert all(what.startswith("actor/optim") and what.endswith("is repeated") for _, what in said)


POISONED = {
    "without_switch_model": "NaN",  # in the logits, which stops the sampler
    "critic_flag_forced": "step 1, train_critic: the loss of every minibatch is NaN or infinite. .*: the weights",
}


@pytest.mark.parametrize("fault", POISONED)
def test_the_invariance_test_sees_a_missing_restore(fault, tmp_path):
    """With the restore left out, or the critic's only copy gone, the run computes with poison and not in silence."""
    with pytest.raises(WorkerError, match=POISONED[fault]):
        run_cases({"lean": CASES["lean"]}, nproc=1, log_dir=tmp_path, fault=fault)


def test_a_warm_up_that_is_not_finite_ends_the_run(tmp_path):
    expected = "warm_up, its step 1: the loss of every minibatch is NaN or infinite. .*: the weights .* of the actor"
    with pytest.raises(WorkerError, match=expected):
        run_cases({"lean": CASES["lean"]}, nproc=2, log_dir=tmp_path, fault="nan_weights")


def test_a_rank_without_memory_ends_the_run_where_gradients_are_reduced_during_the_passes(tmp_path):
    """The others are in the middle of a reduction then."""
    extra = ("roles.actor.ddp.overlap_grad_reduce=true", "roles.critic.ddp.overlap_grad_reduce=true")
    case = {name: case for name, case in scheduled_cases(nproc=2).items() if name == "lean, room for everything"}
    with pytest.raises(WorkerError, match="OutOfMemoryError: made up"):
        run_cases(case, nproc=2, log_dir=tmp_path, fault="out_of_memory", extra=extra)


def test_a_launched_pair_gives_the_same_records(tmp_path):
    """The same through the front door: two commands, two fresh worker groups."""
    records = {}
    for offload in ("none", "train"):
        directory = tmp_path / offload
        command = [sys.executable, "-m", "trainer", *SMALL, f"offload={offload}", f"hydra.run.dir={directory}"]
        done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[2], check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        lines = (directory / "metrics.jsonl").read_text().splitlines()
        records[offload] = lasting(map(json.loads, lines))
        assert (directory / "report.md").exists()
    assert records["none"] == records["train"]
    assert len(records["none"]) == 3
