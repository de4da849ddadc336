"""Tensor, pipeline, virtual pipeline and context parallelism compute what one rank computes, and sleeping changes no
bit."""

import pytest
import torch

from tests.helpers.composing import SMALL, config_of
from tests.helpers.invariance import numbers
from tests.helpers.parallel_worker import Job, run_job
from trainer.algo.log_probs import log_probs_and_entropy
from trainer.command.launch import launch
from trainer.command.launch_environment import worker_environment

TP, PP, VPP = ("parallel.tp=2",), ("parallel.pp=2",), ("parallel.pp=2", "parallel.vpp=2")
CP = ("parallel.cp=2",)
TIED = ("model.tie_embeddings=true", "model.qk_norm=false", "model.qkv_bias=true")
PLAIN = tuple(f"roles.{role}.ddp.use_distributed_optimizer=false" for role in ("actor", "critic"))
MOE = (
    *("model.num_experts=4", "model.num_experts_per_tok=2", "model.ffn_size=72", "model.kv_heads=4"),
    "model.router_aux_loss_coef=0.5",
)
OVERLAP = tuple(
    f"roles.{role}.ddp.overlap_{name}=true" for role in ("actor", "critic") for name in ("grad_reduce", "param_gather")
)
LAYOUTS = {
    1: {"one": (), "one_tied": TIED, "one_moe": MOE},
    2: {
        "tp": (*TP, "training.recompute=selective"),
        "tp_plain": (*TP, *PLAIN),
        "pp": PP,
        "pp_tied": (*PP, *TIED),
        "vpp": (*VPP, *OVERLAP),
        "tp_moe": (*TP, *MOE, "training.recompute=full"),
        "tp_ep_moe_plain": (*TP, *MOE, "parallel.expert=2", *PLAIN),
        "tp_moe_plain": (*TP, *MOE, *PLAIN),
        "vpp_moe": (*VPP, *MOE, "training.recompute=full"),
        "cp": CP,
        "cp_tied_recompute": (*CP, *TIED, "training.recompute=full"),
        "cp_ep_moe_plain": (*CP, *MOE, "parallel.expert=2", "training.recompute=selective", *PLAIN),
    },
    4: {
        "tp_vpp": (*TP, *VPP),
        "dp_tp": TP,
        "tp_pp_tied": (*TP, *PP, *TIED),
        "tp_pp_ep_moe": (*TP, *PP, *MOE, "parallel.expert=2"),
        "dp_tp_ep_moe": (*TP, *MOE, "parallel.expert=4"),
        "tp4_ep_moe": ("parallel.tp=4", *MOE, "parallel.expert=2"),
        "dp_tp_moe_overlap": (*TP, *MOE, *OVERLAP),
        "dp_vpp_ep_moe": (*VPP, *MOE, "parallel.expert=2", "algo.micro_batch_size=1"),
        "tp_cp_moe": (*TP, *CP, *MOE),
        "cp4": ("parallel.cp=4",),
        "dp_cp": (*CP, *OVERLAP),
        "vpp_cp_tied": (*VPP, *CP, *TIED),
    },
}
SHARED = [name for ranks in (2, 4) for name in LAYOUTS[ranks]]


POLICIES = {
    "none": ("offload=none",),
    "full": ("memory=full",),
    "lean": ("memory=lean",),
    "rebuild": ("memory=rebuild",),
    "sharded": ("memory=lean", "memory.tags=sharded"),
    "node": ("memory=lean", "memory.tags=node"),
}
FOUR = "model.layers=4"  # two for each stage; other runs have as few as they need
RUNS = {
    1: {},
    2: {"tp": TP, "vpp": (*VPP, FOUR), "tp_moe": (*TP, *MOE), "vpp_moe": (*VPP, *MOE, FOUR)},
    4: {"tp_pp": (*TP, *PP), "dp_pp": (*PP, "model.tie_embeddings=true"), "dp_cp": (*CP, *MOE, "parallel.expert=4")},
}
SLEEPERS = {2: {"tp": (*TP, *MOE), "vpp": (*VPP, *MOE, FOUR)}}
# Tags are shared where several ranks hold the same.
POLICIES_OF = {
    "dp_pp": ("none", "sharded", "node"),
    "dp_cp": ("none", "sharded", "node"),
    "tp_moe": ("none", "rebuild", "sharded"),
    "vpp_moe": ("none", "lean"),
}


def policies_of(layout):
    return POLICIES_OF.get(layout, ("none", "full", "lean", "rebuild"))


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """The results of a worker group of one, of two and of four ranks, together."""
    environment = worker_environment(platform="cpu", sleeps=True, threads_per_worker=1)
    results = {"layouts": {}, "runs": {}, "asleep": {}}
    for ranks, layouts in LAYOUTS.items():
        nproc = f"launch.nproc={ranks}"
        runs = {
            (name, policy): config_of(*SMALL, nproc, *layout, *POLICIES[policy])
            for name, layout in RUNS[ranks].items()
            for policy in policies_of(name)
        }
        directory = tmp_path_factory.mktemp("parallel")
        sleepers = {name: (nproc, *overrides) for name, overrides in SLEEPERS.get(ranks, {}).items()}
        job = Job({name: (nproc, *overrides) for name, overrides in layouts.items()}, runs, sleepers, directory)
        one = launch(run_job, job, nproc=ranks, log_dir=directory / "logs", environment=environment)
        results = {**one, **{key: results[key] | one[key] for key in results}}
    return results


def reference_of(layout):
    return "one_tied" if "tied" in layout else "one_moe" if "moe" in layout else "one"


@pytest.mark.parametrize("layout", SHARED)
def test_the_same_seed_gives_the_same_whole_model(found, layout):
    """Name, order and bits of all that is exported, file by file; a critic takes the actor's body part by part."""
    actual, expected = (found["layouts"][name] for name in (layout, reference_of(layout)))
    in_order = sorted if "_ep_" in layout else list  # a layer's experts come as they are gathered from ranks
    assert in_order(actual["exported"]) == in_order(expected["exported"])
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
    assert len(expected["steps"]) == 4
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


def test_log_probs_and_entropy_of_a_split_output_layer(found):
    """Ranks add up to the gradient of the hidden states, and each has that of its own entries."""
    everyones = [each["linear"] for each in found["vocabulary"]]
    hidden, weight = (everyones[0][name].requires_grad_() for name in ("hidden", "weight"))
    targets = found["vocabulary"][0]["targets"].flatten()[1:]
    log_probs, entropy = log_probs_and_entropy(
        (hidden[1:] @ weight.T)[None], targets[None], temperature=0.7, vocab_size=5
    )
    (log_probs * torch.arange(11.0) + entropy.square()).sum().backward()
    for each in everyones:
        torch.testing.assert_close(each["log_probs"], log_probs[0].detach())
        torch.testing.assert_close(each["entropy"], entropy[0].detach())
    torch.testing.assert_close(sum(each["hidden_gradient"] for each in everyones), hidden.grad)
    torch.testing.assert_close(torch.cat([each["weight_gradient"] for each in everyones]), weight.grad)


def test_the_load_balancing_loss_of_split_sequences(found):
    """Every rank gets whole sequences' losses, and the gradients of its own columns."""
    everyones = found["balance"]
    whole = {key: everyones[0][key] for key in ("probabilities", "is_chosen", "is_real")}
    experts, (first, second, none) = 5, everyones[0]["losses"].tolist()
    assert none == 0
    for sequence, loss in ((0, first), (1, second)):  # by hand: real tokens come first
        tokens = int(whole["is_real"][:, sequence].sum())
        shares = whole["is_chosen"][:tokens, sequence].double().sum(0) / (2 * tokens)
        means = whole["probabilities"][:tokens, sequence].mean(0)
        assert loss == pytest.approx(experts * float(shares @ means), rel=1e-6)
        expected = (sequence + 1) * experts * shares / tokens
        gradient = torch.cat([each["gradient"] for each in everyones])[:, sequence]
        torch.testing.assert_close(gradient[:tokens], expected.expand(tokens, -1), rtol=1e-6, atol=0)
        assert not gradient[tokens:].any()
    for each in everyones:
        assert torch.equal(each["losses"], everyones[0]["losses"])


@pytest.mark.parametrize("layout", [name for layouts in SLEEPERS.values() for name in layouts])
def test_no_chunk_of_a_sleeping_mixture_keeps_anything(found, layout):
    asleep = found["asleep"][layout]
    assert len(asleep["buffers"]["experts"]) == (1 if layout == "tp" else 0)
    assert asleep["regions"] == {"actor/param", "actor/grad"}
    assert asleep["loose"] == []


@pytest.mark.parametrize(
    ("layout", "policy"),
    [(name, policy) for layouts in RUNS.values() for name in layouts for policy in policies_of(name)[1:]],
)
def test_every_policy_computes_the_bits_of_offload_none(found, layout, policy):
    none, asleep = found["runs"][layout, "none"], found["runs"][layout, policy]
    assert (none["slept"], asleep["slept"]) == (False, True)
    assert none["metrics"][-1]["actor/grad_norm"] > 0
    assert numbers(asleep) == numbers(none)
