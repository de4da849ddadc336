"""Each task through the whole line: a few steps of warm-up, rollouts, PPO."""

import json
import math

import pytest

from tests.helpers.composing import SMALL, config_of
from tests.helpers.invariance_worker import run_matrix
from trainer.command.launch import WorkerError, launch
from trainer.command.launch_environment import worker_environment


def test_every_task_trains_for_a_few_steps(tmp_path):
    lines = [json.dumps({"prompt": f"double {n} =", "answer": str(2 * n)}) for n in range(40)]
    (tmp_path / "questions.jsonl").write_text("\n".join(lines) + "\n")
    tasks = {
        "arithmetic": ("task=arithmetic",),
        "chain_sum": ("task=chain_sum",),
        "reasoning_gym": ("task=reasoning_gym", "task.dataset=basic_arithmetic", "rollout.max_prompt_tokens=96"),
        "calculator": ("task=calculator", "reward=null", "rollout.max_new_tokens=8"),
        "guess_number": ("task=guess_number", "reward=null", "rollout.max_prompt_tokens=60"),
        "jsonl": ("task=jsonl", f"task.path={tmp_path / 'questions.jsonl'}"),
    }
    configs = {name: config_of(*SMALL, *overrides) for name, overrides in tasks.items()}
    environment = worker_environment(platform="cpu", sleeps=True, threads_per_worker=1)
    results = launch(run_matrix, (configs, None), nproc=1, log_dir=tmp_path / "logs", environment=environment)
    for name, result in results.items():
        first, *steps = result["metrics"]
        assert len(steps) == 2, name
        assert 0 <= first["heldout_accuracy"] <= 1
        assert all(0 <= step["reward"] <= 1 and math.isfinite(step["actor/grad_norm"]) for step in steps), name
        # The rollout engine and Megatron agree on the sampled tokens up to bf16 rounding.
        assert all(step["rollout_log_prob_gap"] < 0.02 for step in steps), name
        assert steps[0]["actor/ppo_kl_first"] == 0.0
        assert steps[0]["kl"] == 0.0


def test_ranks_with_different_questions_do_not_begin(tmp_path):
    """One question of 552 differs."""
    config = config_of(*SMALL, "launch.nproc=2", "task._target_=tests.helpers.odd_tasks.RankDependent")
    environment = worker_environment(platform="cpu", sleeps=True, threads_per_worker=1)
    with pytest.raises(WorkerError, match="ValueError: rank 1 holds other questions than rank 0 holds: equal settings"):
        launch(run_matrix, ({"run": config}, None), nproc=2, log_dir=tmp_path / "logs", environment=environment)
