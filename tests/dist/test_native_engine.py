"""rollout=native draws the same responses however ranks share the model and the prompts."""

import pytest
import torch

from tests.helpers.native_engine_worker import MOE, PROMPTS, run_layouts
from trainer.command.launch import launch
from trainer.command.launch_environment import worker_environment

TIED = ("model.tie_embeddings=true", "model.qkv_bias=true")
LAYOUTS = {
    1: {"dense": (), "tied": TIED, "moe": MOE},
    2: {
        "tp": ("parallel.tp=2",),
        "pp": ("parallel.pp=2",),
        "vpp": ("parallel.pp=2", "parallel.vpp=2"),
        "dp": (),
        "pp_tied": ("parallel.pp=2", *TIED),
        "tp_tied": ("parallel.tp=2", *TIED),
        "dp_moe_experts": ("parallel.expert=2", *MOE),
        "tp_moe_experts": ("parallel.tp=2", "parallel.expert=2", *MOE),
        "pp_moe": ("parallel.pp=2", *MOE),
    },
}


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    environment = worker_environment(platform="cpu", sleeps=True, threads_per_worker=1)
    found = {}
    for nproc, layouts in LAYOUTS.items():
        log_dir = tmp_path_factory.mktemp(f"ranks_{nproc}")
        found |= launch(run_layouts, layouts, nproc=nproc, log_dir=log_dir, environment=environment)
    return found


@pytest.mark.parametrize("greedy", [True, False])
@pytest.mark.parametrize("layout", LAYOUTS[2])
def test_ranks_draw_what_one_rank_draws(results, layout, greedy):
    """Other sums round otherwise, so log-probs are close and tokens the same."""
    alone = "moe" if "moe" in layout else "tied" if "tied" in layout else "dense"
    expected, found = results[alone][greedy], results[layout][greedy]
    assert len(found) == len(PROMPTS)
    for (tokens, log_probs), (own_tokens, own_log_probs) in zip(expected, found, strict=True):
        assert torch.equal(tokens, own_tokens)
        torch.testing.assert_close(own_log_probs, log_probs, atol=2e-4, rtol=0)
    assert torch.cat([log_probs for _, log_probs in expected]).std() > 0.3


def test_responses_differ_from_each_other(results):
    """Equal prompts have draws of their own; the greedy ones are equal."""
    drawn, greedy = results["dense"][False], results["dense"][True]
    assert not torch.equal(drawn[9][0], drawn[10][0])
    assert torch.equal(greedy[9][0], greedy[10][0])
