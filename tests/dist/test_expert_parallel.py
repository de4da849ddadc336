"""Experts spread over two ranks compute what they compute on one, asleep, awake, saved and resumed."""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, MixtralConfig

from tests.helpers.checkpoints import assert_same_tensors, whole_tensors
from tests.helpers.expert_parallel_worker import POLICIES, run_checks, run_replicated
from trainer.command.launch import launch
from trainer.command.launch_environment import worker_environment
from trainer.common.safetensors_folder import SafetensorsFolder
from trainer.tasks.arithmetic import ArithmeticTask
from trainer.tasks.tokenizer import load_tokenizer

ENVIRONMENT = worker_environment(platform="cpu", sleeps=True, threads_per_worker=1)


@pytest.fixture(scope="module")
def directory(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("expert_parallel")


@pytest.fixture(scope="module")
def results(directory):
    save_start(directory / "start")
    return launch(run_checks, directory, nproc=2, log_dir=directory / "logs", environment=ENVIRONMENT)


@pytest.fixture(scope="module")
def replicated(directory):
    """Of four ranks, two with each half of the experts."""
    return launch(run_replicated, None, nproc=4, log_dir=directory / "logs4", environment=ENVIRONMENT)


def save_start(folder):
    task = ArithmeticTask(max_operand=9, operations=["plus"], forms="digits", heldout_fraction=0.1, seed=1)
    tokenizer = load_tokenizer(None, task=task, vocab_size=280)
    tokenizer.save_pretrained(folder)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = MixtralConfig(
        **sizes, vocab_size=len(tokenizer), num_key_value_heads=1, num_local_experts=4, max_position_embeddings=128
    )
    torch.manual_seed(1)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)


def test_the_same_seed_gives_the_same_weights_however_they_are_spread(results, replicated):
    one = results["weights", 1]
    assert sum(".experts." in name for name in one) == 2 * 4 * 2
    for other in (results["weights", 2], replicated["weights"]):
        assert one.keys() == other.keys()
        assert all(torch.equal(one[name], other[name]) for name in one)


def test_a_folder_comes_in_and_goes_out_through_both_ranks(results, directory):
    before, after = (SafetensorsFolder(directory / name) for name in ("start", "exported"))
    assert set(before) == set(after)
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert AutoModelForCausalLM.from_pretrained(directory / "exported").config.model_type == "mixtral"


@pytest.mark.parametrize("optimizer", ["distributed", "plain"])
@pytest.mark.parametrize("name", ["actor", "critic"])
def test_gradients_do_not_depend_on_where_experts_lie(results, replicated, name, optimizer):
    expected_sums, expected = results["gradients", 1][name, optimizer]
    assert expected_sums["loss_count"] == 17
    assert expected_sums["aux_loss_sum"] > 17
    for sums, actual in (results["gradients", 2][name, optimizer], replicated["gradients"][name, optimizer]):
        assert sums == pytest.approx(expected_sums, rel=1e-5, abs=1e-6)
        assert actual.keys() == expected.keys()
        for key, right in expected.items():
            assert right.abs().max() > 0, key
            torch.testing.assert_close(actual[key], right, rtol=1e-4, atol=1e-6 * right.abs().max().item())


def test_a_whole_job_in_fp32_gives_the_same_numbers(results):
    one, two = (results["records", size]["fp32"]["metrics"] for size in (1, 2))
    assert len(one) == len(two) == 3
    for left, right in zip(one, two, strict=True):
        assert left.keys() == right.keys()
        for key, value in left.items():
            if not key.startswith(("weights_sha256", "parameters")):
                assert right[key] == pytest.approx(value, rel=1e-3, abs=1e-5), key
    assert two[-1]["rollout_log_prob_gap"] < 1e-5  # the engine has the experts of both ranks
    assert two[-1]["actor/aux_loss"] > 1


@pytest.mark.parametrize("policy", [name for name in POLICIES if name not in ("none", "dense_critic")])
def test_sleeping_does_not_change_a_bit(results, policy):
    found = results["records", 2]
    assert found[policy]["slept"]
    for key in ("metrics", "actor_after_one_more_cycle"):
        assert json.dumps(found[policy][key]) == json.dumps(found["none"][key])


def test_a_dense_critic_beside_a_mixture(results):
    last = results["records", 2]["dense_critic"]["metrics"][-1]
    assert "actor/aux_loss" in last
    assert "critic/aux_loss" not in last
    assert last["critic/loss"] > 0


@pytest.mark.parametrize("name", ["actor", "critic"])
def test_a_cycle_of_sleeps_under_every_policy(results, name):
    expected = results["policies"]["none", name]
    for policy in ("lean", "rebuild"):
        assert results["policies"][policy, name] == expected
    digests = expected[0]
    assert digests[0] != digests[1]  # the ranks have other experts


@pytest.mark.parametrize("name", ["actor", "critic"])
def test_the_buffers_of_the_experts_sleep_too(results, name):
    found = results["asleep"][name]
    head = ["torch.float32"] if name == "critic" else []
    assert found["buffers"] == {"dense": ["torch.bfloat16", *head], "experts": ["torch.bfloat16"]}
    assert found["regions"] == {f"{name}/param", f"{name}/grad"}
    assert found["loose"] == []


def test_every_byte_is_foreseen(results, replicated):
    for footprints in (results["footprints"], replicated["footprints"]):
        for case, found in footprints.items():
            assert found["measured"] == found["predicted"], case


@pytest.mark.parametrize("name", ["resumed", "resumed_sharded"])
def test_a_resumed_job_is_the_unbroken_one(results, directory, name):
    found = results["checkpoints", 2]
    assert json.dumps(found[name]["metrics"]) == json.dumps(found["unbroken"]["metrics"][2:])
    saved, resumed = (directory / run / "checkpoints/step_2" for run in ("spread_2", name))
    assert_same_tensors(resumed, saved)
    for kind in ("weights", "ref", "main"):
        assert sum(key.startswith(f"actor/{kind}/") and ".experts." in key for key in whole_tensors(saved)) == 2 * 4 * 2


def test_a_checkpoint_can_be_spread_otherwise(results, directory):
    whole, spread = (directory / name / "checkpoints/step_2" for name in ("spread_1", "respread"))
    assert_same_tensors(spread, whole)
