"""offload.destroy_process_groups: communicators come and go, numbers and handles stay."""

import json

import pytest

from tests.helpers.composing import SMALL, config_of
from tests.helpers.process_groups_worker import CYCLES, run_cycles, run_jobs
from trainer.command.launch import launch
from trainer.command.launch_environment import worker_environment


def launched(worker, payload, *, nproc, log_dir):
    environment = worker_environment(platform="cpu", sleeps=True, threads_per_worker=1)
    return launch(worker, payload, nproc=nproc, log_dir=log_dir, environment=environment)


@pytest.mark.parametrize("nproc", [1, 2])
def test_every_collective_works_in_every_generation_and_nothing_leaks(nproc, tmp_path):
    result = launched(run_cycles, None, nproc=nproc, log_dir=tmp_path)
    rank_order = [float(rank) for rank in range(nproc) for _ in range(2)]
    last = float(nproc - 1)
    expected = {  # of rank 0
        "all_gather_into_tensor": rank_order,
        "reduce_scatter_tensor": [0.0],
        "broadcast": [last, last],
        "all_gather_object": [{"rank": rank} for rank in range(nproc)],
        "all_gather": rank_order,
        "all_reduce": [last, last],
        "coalesced": [3.0 * nproc] * 2,
        "single": 1.0,
        "world": nproc * (nproc + 1) / 2,
    }
    if nproc > 1:
        expected |= {"batch_isend_irecv": [last, last], "send_recv": [0.0]}
    assert result["values"] == [expected] * CYCLES
    assert result["backend"] == "reloadable_gloo"
    assert result["while_destroyed"] == {
        "live": 0,
        "ranks": list(range(nproc)),
        "shape": [0, nproc, 0, nproc],
        "plain": nproc * (nproc + 1) / 2,
    }
    assert (result["live"], result["left"], result["left_at_end"]) == (3, 2, 0)
    assert len({tuple(counts) for counts in result["open"][1:]}) == 1, result["open"]
    for name, error in result["errors"].items():
        assert "destroyed while everything sleeps" in error, (name, error)
        assert "offload.destroy_process_groups=false" in error, (name, error)


@pytest.mark.parametrize(
    ("nproc", "extra"),
    [
        (1, ()),
        # Without pipeline ranks of its own: rollout=native would need the groups in the rollout, and keep them.
        (2, ("parallel.pp=2", "model.tie_embeddings=true", "rollout=hf")),
        (2, ("roles.actor.ddp.overlap_grad_reduce=true", "roles.actor.ddp.overlap_param_gather=true")),
    ],
    ids=["one-rank", "pipeline", "overlap"],
)
def test_a_run_computes_the_same_bits(nproc, extra, tmp_path):
    common = (*SMALL, f"launch.nproc={nproc}", "algo.num_steps=3", *extra)
    found = {}
    for value in ("false", "true"):
        config = config_of(*common, f"offload.destroy_process_groups={value}")
        found[value] = launched(run_jobs, {"job": config}, nproc=nproc, log_dir=tmp_path / value)
    assert json.dumps(found["true"]["results"]) == json.dumps(found["false"]["results"])
    assert found["true"]["results"]["job"]["slept"]
    assert found["false"]["generations"] == []
    # Made once, then again after three rollouts and two evaluations.
    assert set(found["true"]["generations"]) == {6}


def test_without_sleep_it_is_refused():
    with pytest.raises(ValueError, match=r"offload\.destroy_process_groups=true.*offload=train"):
        config_of("offload=none", "offload.destroy_process_groups=true")
