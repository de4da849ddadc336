"""The real torch_memory_saver on a real GPU: run with ``python -m pytest tests/gpu``."""

import pytest

from tests.composing import SMALL, config_of
from tests.dist.invariance_worker import run_matrix
from tests.dist.test_invariance import CASES, numbers
from tests.gpu.worker import run_scenario
from trainer.launch import launch
from trainer.launch_environment import worker_environment

POLICIES = ("full", "no_grads", "lean", "rebuild")
# 30M parameters a role: large enough that bytes per parameter mean something.
MEDIUM = ("model.layers=4", "model.hidden_size=768", "model.ffn_size=2048", "model.heads=12", "model.kv_heads=4")
MIB = 2**20


def on_gpu(worker, payload, log_dir):
    environment = worker_environment(platform="cuda", sleeps=True, threads_per_worker=4)
    return launch(worker, payload, nproc=1, log_dir=log_dir, environment=environment)


def scenario(name, log_dir, *overrides):
    config = config_of("platform=cuda", "launch.threads_per_worker=4", "memory.poison=true", *overrides)
    return on_gpu(run_scenario, (name, config), log_dir)


def test_every_policy_computes_the_bits_of_offload_none(tmp_path):
    small = [override for override in SMALL if not override.startswith("platform")]
    common = (*small, "platform=cuda", "platform.deterministic=true", "memory.poison=true")
    results = {}
    for name, overrides in CASES.items():  # fresh workers each: the saver of a process cannot be replaced
        results[name] = on_gpu(run_matrix, ({name: config_of(*common, *overrides)}, None), tmp_path / name)[name]
    for name in CASES:
        assert numbers(results[name]) == numbers(results["none"]), name


@pytest.mark.parametrize("policy", POLICIES)
def test_ten_cycles_keep_every_bit_and_memory_stays_flat(policy, tmp_path):
    result = scenario("cycles", tmp_path, f"memory={policy}", "model=small")
    assert all(result["kept"])
    assert max(result["asleep_gpu"][2:]) - min(result["asleep_gpu"][2:]) <= 4 * MIB
    assert max(result["asleep_rss"][2:]) - min(result["asleep_rss"][2:]) <= 32 * MIB


def test_wrong_calls_are_python_errors_and_lose_nothing(tmp_path):
    result = scenario("wrong_calls", tmp_path, *MEDIUM)
    assert result["kept"]
    assert result["other"] == 2**20
    assert len(result["errors"]) == 3
    assert "are missing" in result["errors"][-1]


@pytest.mark.parametrize("policy", POLICIES)
def test_the_gpu_is_as_empty_after_every_path(policy, tmp_path):
    used = scenario("every_path", tmp_path, f"memory={policy}", *MEDIUM)
    assert used.pop("failed_step_updated") is False
    assert used.pop("ref_differs") == 0
    assert max(used.values()) - min(used.values()) <= 4 * MIB, used


def test_no_large_storage_is_left_out_of_the_regions(tmp_path):
    result = scenario("storages", tmp_path, *MEDIUM)
    assert result["segments"] > 0
    assert result["uncovered"] == {}
