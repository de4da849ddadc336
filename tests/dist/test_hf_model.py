"""A run from a Hugging Face folder to a Hugging Face folder, with a chat template and spare rows in the vocabulary."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig

from trainer.tasks.arithmetic import ArithmeticTask
from trainer.tasks.tokenizer import load_tokenizer

ROOT = Path(__file__).parents[2]
TEMPLATE = (
    "{% for m in messages %}user: {{ m['content'] }}\n{% endfor %}{% if add_generation_prompt %}answer:{% endif %}"
)
SPARE_ROWS = 20
OVERRIDES = (
    *("platform=cpu", "launch.threads_per_worker=1", "model=hf", "model.path=start", "tokenizer.chat_template=true"),
    *(
        "export_hf=true",
        "algo.start_critic_from_actor=false",
        "algo.num_steps=2",
        "algo.warmup_steps=1",
        "algo.warmup_batch_size=8",
    ),
    *("algo.prompts_per_step=8", "algo.responses_per_prompt=2", "algo.micro_batch_size=8", "algo.heldout_prompts=8"),
    *("rollout.max_prompt_tokens=40", "rollout.max_new_tokens=4"),
)


def save_start(folder):
    """A random Llama whose spare logits, those that no token has, are by far the largest."""
    task = ArithmeticTask(max_operand=9, operations=["plus"], forms="digits", heldout_fraction=0.1, seed=1)
    tokenizer = load_tokenizer(None, task=task, vocab_size=280)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    config = LlamaConfig(
        vocab_size=len(tokenizer) + SPARE_ROWS,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=64,
        dtype=torch.bfloat16,
    )
    torch.manual_seed(1)
    hf = AutoModelForCausalLM.from_config(config).to(torch.bfloat16)
    with torch.no_grad():
        spare = hf.lm_head.weight[len(tokenizer) :]
        spare.copy_(torch.randn(spare.shape))
    hf.save_pretrained(folder)
    return hf


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    directory = tmp_path_factory.mktemp("hf_model")
    start = save_start(directory / "start")
    environment = os.environ | {"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": "", "COLUMNS": "160"}
    command = [sys.executable, "-m", "trainer", *OVERRIDES, "hydra.run.dir=out"]
    done = subprocess.run(command, cwd=directory, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return start, directory / "out", done.stdout


def test_it_says_where_the_roles_start(run):
    assert "the actor starts from start" in run[2]
    assert "the critic starts from start; its value head is new" in run[2]


def test_tokens_outside_the_tokenizer_have_no_probability(run):
    """Else entropy could exceed its bound, and drawn tokens would be NaN to the trainer."""
    records = [json.loads(line) for line in (run[1] / "metrics.jsonl").read_text().splitlines()]
    entries = run[0].config.vocab_size - SPARE_ROWS
    for record in records[1:]:
        assert 0 < record["entropy"] <= torch.tensor(float(entries)).log()
        assert abs(record["kl"]) < 1


def test_the_trained_actor_is_a_model_of_transformers(run):
    start, directory, _ = run
    trained = AutoModelForCausalLM.from_pretrained(directory / "hf_model")
    assert trained.config.model_type == "llama"
    before, after = start.state_dict(), trained.state_dict()
    assert before.keys() == after.keys()
    assert all(before[name].shape == tensor.shape for name, tensor in after.items())
    distance = (after["lm_head.weight"] - before["lm_head.weight"]).float().abs()
    assert 0 < distance.max() < 0.1
    assert torch.equal(after["lm_head.weight"][-SPARE_ROWS:], before["lm_head.weight"][-SPARE_ROWS:])
    tokenizer = AutoTokenizer.from_pretrained(directory / "hf_model")
    assert tokenizer.chat_template == TEMPLATE
    assert trained.generation_config.eos_token_id == tokenizer.eos_token_id
