"""Whole runs whose sequences are cut over ranks: the numbers of one rank, from rollout to checkpointed weights."""

import pytest

from tests.helpers.context_parallel_worker import peaks
from tests.helpers.invariance import run_cases
from trainer.command.launch import launch
from trainer.command.launch_environment import worker_environment

CASES = {
    "padded": (),
    "packed": ("training.packing=true", "algo.micro_batch_tokens=64", "training.recompute=selective"),
    "by_length": ("algo.micro_batch_tokens=64",),
    "grpo": ("algo=grpo", "policy_loss=gspo", "algo.loss_aggregation=sequence_mean", "algo.micro_batch_size=2"),
}
EXTRA = ("model.dtype=fp32", "offload=none", "algo.epochs=2", "roles.actor.optimizer.lr=1e-3")


@pytest.mark.parametrize("dp", [1, 2])
def test_a_run_computes_what_it_computes_with_whole_sequences(dp, tmp_path):
    extra = (*EXTRA, "algo.micro_batch_size=2")
    whole = run_cases(CASES, nproc=dp, log_dir=tmp_path / "whole", extra=extra)
    shared = run_cases(CASES, nproc=2 * dp, log_dir=tmp_path / "shared", extra=(*extra, "parallel.cp=2"))
    for name in CASES:
        expected, found = whole[name]["metrics"], shared[name]["metrics"]
        assert [record.keys() for record in found] == [record.keys() for record in expected], name
        assert expected[-1]["actor/grad_norm"] > 0.01
        assert expected[-1]["actor/ppo_kl"] != 0
        for ours, theirs in zip(found, expected, strict=True):
            for key, value in theirs.items():
                if not key.startswith("weights_sha256/"):
                    assert ours[key] == pytest.approx(value, rel=2e-3, abs=2e-5), (name, theirs["step"], key)


def test_an_engine_with_weights_of_its_own_draws_shares_too(tmp_path):
    """What a rank drew is what the others train on: the engine's log-probs are those of training."""
    cases = {"hf": ("rollout=hf", "offload.destroy_process_groups=true")}
    extra = ("model.dtype=fp32", "parallel.cp=2", "algo.micro_batch_size=2")
    last = run_cases(cases, nproc=4, log_dir=tmp_path, extra=extra)["hf"]["metrics"][-1]
    assert last["rollout_log_prob_gap"] < 1e-5
    assert last["actor/grad_norm"] > 0


def test_the_plan_knows_the_activations_of_shared_sequences(tmp_path):
    environment = worker_environment(platform="cpu", sleeps=True, threads_per_worker=1)
    one, two = (
        launch(peaks, None, nproc=ranks, log_dir=tmp_path / f"{ranks}", environment=environment) for ranks in (1, 2)
    )
    for case, (measured, planned) in two.items():
        assert 0.9 * planned < measured < 1.1 * planned, case
        assert measured < 0.65 * one[case][0], case
