"""The heart: sleeping must not change a single bit of what a run computes."""

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


@pytest.mark.parametrize("nproc", [1, 2])
def test_every_policy_computes_the_bits_of_offload_none(nproc, tmp_path):
    results = run_cases(CASES, nproc=nproc, log_dir=tmp_path)
    assert [name for name in CASES if not results[name]["slept"]] == ["none"]
    last = results["none"]["metrics"][-1]
    assert {"weights_sha256/actor", "weights_sha256/critic", "heldout_accuracy"} <= last.keys()
    assert all(math.isfinite(v) for v in last.values() if isinstance(v, float))
    assert last["weights_sha256/actor"] != results["none"]["metrics"][0].get("weights_sha256/actor")
    for name in CASES:
        assert numbers(results[name]) == numbers(results["none"]), name


def test_policies_compute_the_same_without_a_critic(tmp_path):
    cases = {name: CASES[name] for name in ("none", "lean", "rebuild")}
    results = run_cases(cases, nproc=2, log_dir=tmp_path, extra=("algo=grpo", "algo.responses_per_prompt=4"))
    last = results["none"]["metrics"][-1]
    assert [name for name in last if name.startswith(("critic/", "weights_sha256/"))] == ["weights_sha256/actor"]
    for name in cases:
        assert numbers(results[name]) == numbers(results["none"]), name


@pytest.mark.parametrize(
    "extra",
    [
        ("roles.actor.ddp.use_distributed_optimizer=false", "roles.critic.ddp.use_distributed_optimizer=false"),
        (
            "roles.actor.ddp.overlap_grad_reduce=true",
            "roles.actor.ddp.overlap_param_gather=true",
            *("training.recompute=full", "training.packing=true", "algo.micro_batch_tokens=64"),
        ),
        ("model.dtype=fp32", "model.tie_embeddings=true", "model.qk_norm=true", "training.recompute=selective"),
    ],
    ids=["plain-optimizer", "overlap-recompute-packed", "fp32-tied-selective"],
)
def test_other_optimizers_and_models_are_invariant_too(extra, tmp_path):
    cases = {name: CASES[name] for name in ("none", "full", "lean", "rebuild")}
    if "use_distributed_optimizer=false" in extra[0]:
        del cases["rebuild"]
    results = run_cases(cases, nproc=2, log_dir=tmp_path, extra=extra)
    for name in cases:
        assert numbers(results[name]) == numbers(results["none"]), name


@pytest.mark.parametrize("nproc", [2, 4])
def test_tags_shared_by_the_ranks_restore_the_same_bits(nproc, tmp_path):
    """The weights of the reference, and the actor's, are all-gathered; on four ranks through groups that are destroyed
    during rollouts."""
    cases = {name: (*CASES[name], "memory.tags=sharded") for name in ("lean", "full", "rebuild")}
    if nproc == 4:
        cases = {"lean": (*cases["lean"], "offload.destroy_process_groups=true")}
    extra = ("algo.micro_batch_size=2",)
    results = run_cases(cases | {"none": CASES["none"]}, nproc=nproc, log_dir=tmp_path, extra=extra)
    for name in cases:
        assert results[name]["slept"]
        assert numbers(results[name]) == numbers(results["none"]), name


def test_ranks_that_share_sequences_keep_the_bits_too(tmp_path):
    """Packed and computed again in the backward pass, under every policy and every schedule's smallest room."""
    cases = {name: CASES[name] for name in ("none", "full", "no_grads", "lean", "rebuild", "packed", "disk")}
    cases["sharded"] = (*CASES["lean"], "memory.tags=sharded")
    cases |= {name: case for name, case in scheduled_cases(nproc=2).items() if "the largest phase" in name}
    extra = ("training.recompute=full", "training.packing=true", "algo.micro_batch_tokens=64")
    results = run_cases(cases, nproc=2, log_dir=tmp_path, extra=("parallel.cp=2", *extra))
    assert results["none"]["metrics"][-1]["actor/grad_norm"] > 0
    for name in cases:
        assert results[name]["slept"] == (name != "none")
        assert numbers(results[name]) == numbers(results["none"]), name


def test_copies_that_come_as_late_as_they_may_change_nothing(tmp_path):
    """On a GPU an optimizer state comes back while the forward pass runs; nobody may read it before waiting for it."""
    cases = {name: CASES[name] for name in ("none", "lean", "rebuild")}
    scheduled = scheduled_cases(nproc=1)
    cases |= {name: scheduled[name] for name in scheduled if name.endswith("the largest phase")}
    results = run_cases(cases, nproc=1, log_dir=tmp_path, fault="late_copies")
    for name in cases:
        assert numbers(results[name]) == numbers(results["none"]), name


@pytest.mark.parametrize("nproc", [1, 2])
def test_whatever_the_schedule_lets_sleep_nothing_changes(nproc, tmp_path):
    cases = scheduled_cases(nproc=nproc)
    results = run_cases(cases | {"none": CASES["none"]}, nproc=nproc, log_dir=tmp_path)
    for name, overrides in cases.items():
        room_bytes = float(overrides[-1].partition("=")[2]) * 2**30
        assert numbers(results[name]) == numbers(results["none"]), name
        assert 0 < results[name]["held_bytes"] <= room_bytes, name
        assert results[name]["notes"] == [], name
    for keeper in KEEPERS:
        moving = {name: set(found["moving_phases"]) for name, found in results.items() if name.startswith(keeper)}
        assert moving[f"{keeper}, room for everything"] <= {"ref_log_probs", "log_probs"}, "it switches weights alone"
        phases = {"rollout", "ref_log_probs", "log_probs", "values", "train_critic", "train_actor"}
        assert phases <= moving[f"{keeper}, room for the largest phase"]


@pytest.mark.parametrize("nproc", [1, 2])
def test_a_pass_without_memory_is_repeated_once_others_have_made_room(nproc, tmp_path):
    """With two ranks one alone has no memory, in a pass of training before gradients are reduced."""
    cases = {name: case for name, case in scheduled_cases(nproc=nproc).items() if "everything" in name}
    base = run_cases({"none": CASES["none"]}, nproc=nproc, log_dir=tmp_path / "none")["none"]
    for name, found in run_cases(cases, nproc=nproc, log_dir=tmp_path / "auto", fault="out_of_memory").items():
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
