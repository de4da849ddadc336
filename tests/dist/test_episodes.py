"""Episodes on several ranks: the same draws on however many, and one answer where ranks share a model."""

import pytest

from tests.helpers.checkpoint_worker import Case
from tests.helpers.checkpoint_worker import run_cases as run_with_checkpoints
from tests.helpers.checkpoints import assert_same_tensors, checkpoint_of
from tests.helpers.composing import SMALL, config_of
from tests.helpers.episodes_worker import play_a_step
from tests.helpers.invariance import CASES, numbers, run_cases
from trainer.command.launch import launch
from trainer.command.launch_environment import worker_environment

COMMON = ("task=guess_number", "reward=null", "model.dtype=fp32", "model.init_std=0.3", "rollout.max_prompt_tokens=60")


def step_of(log_dir, *overrides, nproc=1):
    config = config_of(*SMALL, *COMMON, f"launch.nproc={nproc}", *overrides)
    environment = worker_environment(platform="cpu", sleeps=True, threads_per_worker=1)
    return launch(play_a_step, config, nproc=nproc, log_dir=log_dir / f"{nproc}", environment=environment)


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    return step_of(tmp_path_factory.mktemp("alone"))


def test_data_parallel_ranks_draw_what_one_rank_draws(alone, tmp_path):
    pair = step_of(tmp_path, nproc=2)
    (only,) = alone["ranks"]
    assert [len(rank["rows"]) for rank in pair["ranks"]] == [8, 8]
    assert pair["ranks"][0]["rows"] | pair["ranks"][1]["rows"] == only["rows"]
    assert len({str(tokens) for tokens, _, _ in only["rows"].values()}) == 16
    assert pair["metrics"] == alone["metrics"]
    assert alone["metrics"]["episode/turns_max"] == 4.0
    assert [rank["few"] for rank in pair["ranks"]] == [only["few"], []]  # one example: nothing is left for rank 1


@pytest.mark.parametrize("shared", ["tp", "cp"])
def test_ranks_that_share_sequences_ask_the_environment_once(shared, alone, tmp_path):
    """Context parallel ranks draw half of the responses each; of one response, the second draws none."""
    pair = step_of(tmp_path, f"parallel.{shared}=2", nproc=2)
    first, second = pair["ranks"]
    assert first["rows"] == second["rows"]
    assert first["few"] == second["few"] == alone["ranks"][0]["few"]
    assert second["asked"] == 0
    assert first["asked"] == alone["ranks"][0]["asked"]
    assert pair["metrics"] == alone["metrics"]


@pytest.mark.parametrize(
    "extra",
    [
        ("task=calculator", "task.call_share=1", "training.packing=true", "algo.micro_batch_tokens=64"),
        ("task=guess_number", "rollout.max_prompt_tokens=60", "rollout=hf", "offload.destroy_process_groups=true"),
    ],
    ids=["calculator-packed", "game-hf-groups-destroyed"],
)
def test_every_policy_computes_the_bits_of_offload_none_over_several_turns(extra, tmp_path):
    cases = {name: CASES[name] for name in ("none", "lean", "rebuild")}
    if "offload.destroy_process_groups=true" in extra:
        cases["none"] = (*cases["none"], "offload.destroy_process_groups=false")
    learns = ("algo.warmup_steps=30", "algo.warmup_lr=5e-3", "rollout.max_new_tokens=8", "reward=null")
    results = run_cases(cases, nproc=2, log_dir=tmp_path, extra=(*extra, *learns))
    last = results["none"]["metrics"][-1]
    assert last["episode/turns_max"] > 1
    assert last["rollout_log_prob_gap"] < 0.05
    for name in cases:
        assert numbers(results[name]) == numbers(results["none"]), name


def test_a_resumed_run_of_several_turns_is_the_unbroken_one(tmp_path):
    """An episode is drawn within a step, so a checkpoint need hold nothing of it."""
    learns = ("algo.warmup_steps=30", "algo.warmup_lr=5e-3", "rollout.max_new_tokens=8", "reward=null")
    saves = ("algo.num_steps=3", "checkpoint.every_steps=1", "checkpoint.keep_last=9")
    given = (*SMALL, "task=calculator", "task.call_share=1", *learns, *saves)
    unbroken = Case("unbroken", config_of(*given, "memory=rebuild"), tmp_path / "unbroken")
    start = checkpoint_of(unbroken.directory, 1)
    resumed = Case("resumed", config_of(*given, "memory=lean"), tmp_path / "resumed", start)
    environment = worker_environment(platform="cpu", sleeps=True, threads_per_worker=1)
    results = launch(run_with_checkpoints, [unbroken, resumed], nproc=1, log_dir=tmp_path, environment=environment)
    expected = results["unbroken"]["metrics"]
    assert max(record["episode/turns_max"] for record in expected[2:]) > 1
    assert results["resumed"]["metrics"] == expected[2:]
    assert_same_tensors(checkpoint_of(resumed.directory, 3), checkpoint_of(unbroken.directory, 3))
