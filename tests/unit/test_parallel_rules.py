"""Parallel layouts that cannot be: refused before anything starts, with what fits."""

import re

import pytest

from tests.helpers.composing import config_of, error_of, suggested

MODEL = ("platform=cpu", "model.layers=4", "model.hidden_size=64", "model.heads=8", "model.kv_heads=4")
BATCHES = (
    "algo.warmup_batch_size=64",
    "algo.prompts_per_step=32",
    "algo.responses_per_prompt=4",
    "algo.micro_batch_size=4",
)


def refused(*overrides: str) -> str:
    return error_of(*MODEL, *BATCHES, *overrides)


def accepted(*overrides: str):
    return config_of(*MODEL, *BATCHES, *overrides)


def test_the_world_size_spells_out_its_factors():
    message = refused("parallel.tp=2", "parallel.pp=2", "launch.nproc=6")
    assert message == (
        "launch.nproc=6 is no multiple of parallel.tp * parallel.pp * parallel.cp = 2 * 2 * 1 = 4: "
        "use launch.nproc=4 or other parallel sizes"
    )
    assert accepted("parallel.tp=2", "parallel.pp=2", *suggested(message)).data_parallel_size == 1
    assert accepted("parallel.tp=2", "parallel.pp=2", "launch.nproc=8").data_parallel_size == 2
    assert "parallel.tp=0: must be between 1 and 1000" in refused("parallel.tp=0")
    assert "parallel.vpp=0: must be between 1 and 1000" in refused("parallel.vpp=0")


def test_tensor_parallel_sizes_that_fit_are_listed():
    message = refused("model.ffn_size=96", "parallel.tp=3", "launch.nproc=3")
    assert re.search(r"parallel.tp=3 .*heads=8, kv_heads=4 and ffn_size=96; .*parallel.tp=1, 2, 4$", message)
    for tp in (1, 2, 4):
        accepted("model.ffn_size=96", f"parallel.tp={tp}", f"launch.nproc={tp}")
    for wrong in ("model.ffn_size=97", "model.heads=9 model.kv_heads=9 model.head_size=8", "model.kv_heads=1"):
        assert "parallel.tp=2 does not divide" in refused(*wrong.split(), "parallel.tp=2", "launch.nproc=2")


def test_ranks_that_share_sequences_need_a_chunk_for_each_and_another_attention_than_te():
    short = ("rollout.max_prompt_tokens=4", "rollout.max_new_tokens=3")
    message = refused(*short, "parallel.cp=4", "launch.nproc=4")
    assert "parallel.cp=4 cuts every sequence into 8 chunks" in message
    assert "has 7 tokens" in message
    assert accepted(*short, *suggested(message), "launch.nproc=3").parallel.cp == 3
    assert "parallel.cp=0: must be between 1 and 1000" in refused("parallel.cp=0")
    for setting in ("kernels", "attention_backend"):
        message = refused(f"roles.critic.model.{setting}=te", "parallel.cp=2", "launch.nproc=2")
        assert f"roles.critic.model.{setting}=te with parallel.cp=2" in message
        assert accepted(*suggested(message)[:1], "parallel.cp=2", "launch.nproc=4").data_parallel_size == 2
    assert accepted("parallel.cp=2", "parallel.tp=2", "launch.nproc=8").weight_copies == 4


def test_pipelines_that_fit_the_layers_are_listed():
    message = refused("model.layers=6", "parallel.pp=2", "parallel.vpp=2", "launch.nproc=2")
    assert "layers=6 is no multiple of parallel.pp * parallel.vpp = 2 * 2 = 4" in message
    assert message.endswith(
        "What fits: parallel.pp=1; parallel.pp=2; parallel.pp=2 parallel.vpp=3; parallel.pp=3; "
        "parallel.pp=3 parallel.vpp=2; parallel.pp=6"
    )
    accepted("model.layers=6", "parallel.pp=2", "parallel.vpp=3", "launch.nproc=2")
    # A critic with another number of layers is judged by its own.
    assert "roles.critic.model.layers=3 is no" in refused(
        "roles.critic.model.layers=3", "parallel.pp=2", "launch.nproc=2"
    )


def test_chunks_without_stages_are_refused():
    message = refused("parallel.vpp=2")
    assert "parallel.vpp=2 with parallel.pp=1" in message
    accepted("parallel.vpp=2", "launch.nproc=2", *suggested(message)[:1])
    accepted(suggested(message)[1])


@pytest.mark.parametrize(
    ("vpp", "overrides", "numbers"),
    [
        # Two ranks of data parallelism; with interleaved chunks micro-batches come in pairs.
        (1, ["algo.warmup_batch_size=12"], "=12 is no multiple of data-parallel size * algo.micro_batch_size = 8,"),
        (
            2,
            ["algo.warmup_batch_size=24"],
            "=24 is no multiple of data-parallel size * algo.micro_batch_size * parallel.pp = 16,",
        ),
        (2, ["algo.prompts_per_step=24", "algo.minibatches=4"], " * parallel.pp * algo.minibatches = 64,"),
    ],
)
def test_micro_batches_of_a_pipeline_have_one_shape_and_come_in_turns(vpp, overrides, numbers):
    layout = ("parallel.pp=2", f"parallel.vpp={vpp}", "launch.nproc=4")
    message = refused(*layout, *overrides)
    assert numbers in message
    accepted(*layout, *overrides, *suggested(message))
    accepted("launch.nproc=2", *overrides)
    if "warmup" in overrides[0]:
        accepted(*layout, *overrides, "algo.warmup_steps=0")


def test_a_warm_up_batch_may_be_a_single_micro_batch_or_without_a_pipeline_uneven():
    accepted("algo.warmup_batch_size=6", "parallel.pp=2", "launch.nproc=4")
    accepted("algo.warmup_batch_size=6")
