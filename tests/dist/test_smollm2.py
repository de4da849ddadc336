"""experiment=smollm2 on a random model of SmolLM2's architecture, small enough for a test: tied embeddings, three query
heads a group, bf16, ChatML."""

import math

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from tests.helpers.composing import config_of
from tests.helpers.invariance_worker import run_matrix
from trainer.command.launch import launch
from trainer.command.launch_environment import worker_environment
from trainer.config.pieces import make_task
from trainer.tasks.tokenizer import load_tokenizer

pytest.importorskip("reasoning_gym")

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SMALLER = (
    *("platform=cpu", "launch.threads_per_worker=1", "task.heldout_size=16", "rollout.max_prompt_tokens=160"),
    *("algo.num_steps=3", "algo.evaluate_every=2", "algo.prompts_per_step=4", "algo.minibatches=1"),
    *("algo.micro_batch_size=8", "algo.heldout_prompts=16", "rollout.max_new_tokens=4"),
    f"task.verifier={__name__}.starts_early",  # random weights never get a sum right
)


def starts_early(response, example):
    """Pays about half of what random weights write."""
    return float(response[:1] < "a")


def save_start(folder):
    task = make_task(config_of("task=chain_sum"))
    tokenizer = load_tokenizer(None, task=task, vocab_size=320)
    tokenizer.chat_template = CHATML
    tokenizer.save_pretrained(folder)
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=48,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=3,
        num_key_value_heads=1,
        head_dim=16,
        initializer_range=0.1,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        dtype=torch.bfloat16,
    )
    AutoModelForCausalLM.from_config(config).to(torch.bfloat16).save_pretrained(folder)


@pytest.fixture(scope="module")
def records(tmp_path_factory):
    folder = tmp_path_factory.mktemp("smollm2")
    save_start(folder / "start")
    config = config_of("experiment=smollm2", f"model.path={folder / 'start'}", *SMALLER)
    assert config.critic_starts_from_actor
    assert config.roles["actor"].model.dtype == "bf16"
    environment = worker_environment(platform="cpu", sleeps=True, threads_per_worker=1)
    results = launch(run_matrix, ({"run": config}, None), nproc=1, log_dir=folder, environment=environment)
    return results["run"]["metrics"]


def test_it_trains_from_the_first_step_on(records):
    assert [record["step"] for record in records] == [0, 1, 2, 3]
    first = records[1]
    assert first["reward_std"] > 0
    assert first["kl"] == first["actor/ppo_kl"] == 0  # no warm-up: actor and reference are the folder's model
    assert all(0 < record["actor/grad_norm"] < math.inf for record in records[1:])
    assert records[3]["kl"] != 0


def test_engine_and_trainer_agree(records):
    """But for bf16's rounding: logits have a standard deviation of 0.7, and so would be the gap between two tokens."""
    assert all(0 < record["rollout_log_prob_gap"] < 0.03 for record in records[1:])


def test_the_heldout_accuracy_is_measured_every_so_many_steps(records):
    assert [record["step"] for record in records if "heldout_accuracy" in record] == [0, 2, 3]
