"""Tensor, pipeline and virtual pipeline parallelism compute what one rank computes, and sleeping changes no bit."""

import pytest
import torch

from tests.composing import SMALL, config_of
from tests.dist.parallel_worker import Job, run_job
from tests.dist.test_invariance import numbers
from trainer.algo.log_probs import log_probs_and_entropy
from trainer.launch import launch
from trainer.launch_environment import worker_environment

TP, PP, VPP = ("parallel.tp=2",), ("parallel.pp=2",), ("parallel.pp=2", "parallel.vpp=2")
TIED = ("model.tie_embeddings=true", "model.qk_norm=false", "model.qkv_bias=true")
PLAIN = tuple(f"roles.{role}.ddp.use_distributed_optimizer=false" for role in ("actor", "critic"))
OVERLAP = tuple(
    f"roles.{role}.ddp.overlap_{name}=true" for role in ("actor", "critic") for name in ("grad_reduce", "param_gather")
)
LAYOUTS = {
    1: {"one": (), "one_tied": TIED},
    2: {"tp": TP, "tp_plain": (*TP, *PLAIN), "pp": PP, "pp_tied": (*PP, *TIED), "vpp": (*VPP, *OVERLAP)},
    4: {"tp_vpp": (*TP, *VPP), "dp_tp": TP, "tp_pp_tied": (*TP, *PP, *TIED)},
}
SHARED = [name for ranks in (2, 4) for name in LAYOUTS[ranks]]


POLICIES = {
    "none": ("offload=none",),
    "full": ("memory=full",),
    "lean": ("memory=lean",),
    "rebuild": ("memory=rebuild",),
    "sharded": ("memory=lean", "memory.tags=sharded"),
}
RUNS = {1: {}, 2: {"tp": TP, "vpp": VPP}, 4: {"tp_pp": (*TP, *PP), "dp_pp": (*PP, "model.tie_embeddings=true")}}
WITH_TAGS = ("dp_pp",)  # where several data-parallel ranks could share the tags


def policies_of(layout):
    return ("none", "sharded") if layout in WITH_TAGS else ("none", "full", "lean", "rebuild")


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """The results of a worker group of one, of two and of four ranks, together."""
    environment = worker_environment(platform="cpu", sleeps=True, threads_per_worker=1)
    results = {"layouts": {}, "runs": {}}
    for ranks, layouts in LAYOUTS.items():
        nproc = f"launch.nproc={ranks}"
        runs = {
            (name, policy): config_of(*SMALL, "model.layers=4", nproc, *layout, *POLICIES[policy])
            for name, layout in RUNS[ranks].items()
            for policy in policies_of(name)
        }
        directory = tmp_path_factory.mktemp("parallel")
        job = Job({name: (nproc, *overrides) for name, overrides in layouts.items()}, runs, directory)
        one = launch(run_job, job, nproc=ranks, log_dir=directory / "logs", environment=environment)
        results = {**one, **{key: results[key] | one[key] for key in results}}
    return results


def reference_of(layout):
    return "one_tied" if "tied" in layout else "one"


@pytest.mark.parametrize("layout", SHARED)
def test_the_same_seed_gives_the_same_whole_model(found, layout):
    """Name, order and bits of all that is exported, file by file; a critic takes the actor's body part by part."""
    actual, expected = (found["layouts"][name] for name in (layout, reference_of(layout)))
    assert actual["exported"] == expected["exported"]
    assert "model.safetensors" in expected["folder"]
    assert actual["folder"] == expected["folder"]
    bodies = [
        {name: digest for name, digest in each["critic_from_actor"].items() if name != "output_layer.weight"}
        for each in (actual, expected)
    ]
    assert bodies[0] == bodies[1]


@pytest.mark.parametrize("layout", SHARED)
def test_an_exported_folder_is_imported_part_by_part(found, layout):
    actual = found["layouts"][layout]
    assert actual["imported"] == actual["exported"] != actual["trained"]


@pytest.mark.parametrize("role", ["actor", "critic"])
@pytest.mark.parametrize("layout", SHARED)
def test_outputs_losses_and_weights_are_those_of_one_rank(found, layout, role):
    actual, expected = (found["layouts"][name][role] for name in (layout, reference_of(layout)))
    rows = len(actual["outputs"][0])  # this rank's share of the batch under data parallelism
    for ours, theirs in zip(actual["outputs"], expected["outputs"], strict=True):
        torch.testing.assert_close(ours, theirs[:rows], rtol=1e-5, atol=1e-5)
    assert len(expected["steps"]) == 3
    for ours, theirs in zip(actual["steps"], expected["steps"], strict=True):
        assert theirs["grad_norm"] > 0.01  # so that clipping counts
        assert ours == pytest.approx(theirs, rel=2e-4, abs=1e-5)
    assert actual["weights"].keys() == expected["weights"].keys()
    for name, theirs in expected["weights"].items():
        # Adam turns rounding of gradients near zero into steps; few elements have such gradients.
        assert (actual["weights"][name] - theirs).abs().mean() < 2e-6, name


def test_log_probs_and_entropy_of_a_split_vocabulary(found):
    everyones = found["vocabulary"]
    logits, targets = everyones[0]["logits"].requires_grad_(), everyones[0]["targets"]
    log_probs, entropy = log_probs_and_entropy(logits, targets, temperature=0.7, vocab_size=5)
    (log_probs * torch.arange(6.0) + entropy.square()).sum().backward()
    for each in everyones:
        torch.testing.assert_close(each["log_probs"], log_probs.detach())
        torch.testing.assert_close(each["entropy"], entropy.detach())
    torch.testing.assert_close(torch.cat([each["gradient"] for each in everyones], dim=-1), logits.grad)


@pytest.mark.parametrize(
    ("layout", "policy"),
    [(name, policy) for layouts in RUNS.values() for name in layouts for policy in policies_of(name)[1:]],
)
def test_every_policy_computes_the_bits_of_offload_none(found, layout, policy):
    none, asleep = found["runs"][layout, "none"], found["runs"][layout, policy]
    assert (none["slept"], asleep["slept"]) == (False, True)
    assert none["metrics"][-1]["actor/grad_norm"] > 0
    assert numbers(asleep) == numbers(none)
