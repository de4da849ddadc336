"""What nobody reads is neither computed nor kept: a reference model without KL, log-probs that training has too."""

import json

import pytest

from tests.helpers.checkpoints import save
from tests.helpers.composing import SMALL, config_of, footprint_of
from tests.helpers.recording import lasting, recorded
from tests.helpers.roles import fresh_saver, small_config, weights_of
from trainer import loop, worker
from trainer.checkpoint import folder
from trainer.measure.metrics import OBSERVED
from trainer.measure.phases import Phases

pytestmark = pytest.mark.usefixtures("saver")

ONE_PASS = ("algo.minibatches=1", "algo.epochs=1")
GROUPS = ("algo=grpo", "algo.responses_per_prompt=4")
NO_KL = ("algo.kl.coef=0",)


def run_of(*overrides):
    """(records, events of memory.jsonl) of a whole small run."""
    fresh_saver()
    outputs, records = recorded()
    events = []
    loop.train(worker.build(small_config(*overrides), Phases(events.append, gpu=False)), outputs)
    return records, events


def without(records, keys):
    """``keys``: whole ones, or what they begin with up to a slash."""
    kept = [
        {k: v for k, v in record.items() if not {k, k.partition("/")[0] + "/"} & keys} for record in lasting(records)
    ]
    return json.dumps(kept, sort_keys=True)


# ---- old log-probs ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "overrides",
    [
        GROUPS,
        (*GROUPS, "model.dtype=fp32", "algo.micro_batch_tokens=64", "algo.entropy_coef=0.01"),
        (*NO_KL, "algo.critic_warmup_steps=1"),
        (*GROUPS, "algo.kl.target=0.001", "algo.kl.horizon=32", "rollout.temperature=0.7"),
        (*NO_KL, "model=tiny_moe", "model.ffn_size=32", "model.router_aux_loss_coef=0.01"),
    ],
    ids=["grpo", "fp32-by-length", "only-the-critic-first", "adaptive", "experts"],
)
def test_the_training_pass_gives_the_bits_of_a_pass_of_its_own(overrides):
    """Weights, losses and gradients are equal bit for bit; means over the rollout are summed in another order."""
    before, during = (run_of(*ONE_PASS, *overrides, f"algo.old_log_probs={how}")[0] for how in ("forward", "training"))
    not_compared = {*OBSERVED, "mismatch/"}  # which is known before training or not at all
    assert without(before, not_compared) == without(during, not_compared)
    assert before[-1]["weights_sha256/actor"] == during[-1]["weights_sha256/actor"]
    for left, right in zip(before, during, strict=True):
        for name in OBSERVED:
            assert (name in left) == (name in right)
            assert left.get(name, 0.0) == pytest.approx(right.get(name, 0.0), rel=1e-12)
        trains_actor = "actor/loss" in right
        assert ("seconds/log_probs" in right) == (not trains_actor and right["step"] > 0)
        assert ("seconds/log_probs" in left) == (left["step"] > 0)
        if trains_actor:
            assert right["actor/ratio"] == 1.0


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (ONE_PASS, False),  # PPO's KL is in the reward
        ((*ONE_PASS, *NO_KL), True),
        ((*ONE_PASS, "algo.kl.coef=0", "algo.kl.target=0.1"), False),
        ((*ONE_PASS, *GROUPS), True),
        ((*ONE_PASS, *GROUPS, "algo.old_log_probs=forward"), False),
        ((*GROUPS, "algo.minibatches=2"), False),
        ((*GROUPS, *ONE_PASS[:1], "algo.epochs=2"), False),
    ],
)
def test_auto_leaves_the_pass_out_where_nothing_needs_it(overrides, expected):
    assert small_config(*overrides).algo.old_log_probs_come_from_training == expected


@pytest.mark.parametrize(
    "overrides", [ONE_PASS, (*NO_KL, "algo.minibatches=2"), (*NO_KL, *ONE_PASS[:1], "algo.epochs=2")]
)
def test_training_alone_is_refused_where_something_reads_them_before(overrides):
    with pytest.raises(ValueError, match=r"algo.old_log_probs=training with .*Use algo.old_log_probs=auto or forward"):
        config_of(*SMALL, *overrides, "algo.old_log_probs=training")


# ---- reference -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("memory", ["lean", "rebuild"])
@pytest.mark.parametrize("algo", [(), GROUPS], ids=["ppo", "grpo"])
def test_without_kl_the_numbers_are_those_of_a_coefficient_of_zero(memory, algo):
    """A target keeps the reference, and a coefficient of zero stays zero under it."""
    overrides = (*NO_KL, *algo, f"memory={memory}", "algo.old_log_probs=forward")
    asked, events = run_of(*overrides, "algo.kl.target=0.01")
    unasked, fewer_events = run_of(*overrides)
    assert "kl" in asked[-1]
    assert "seconds/ref_log_probs" in asked[-1]
    of_kl = {"kl", "actor/kl_loss"}
    assert without(asked, of_kl) == without(unasked, of_kl)
    assert not [key for record in unasked for key in record if key == "kl" or "ref_log_probs" in key]
    assert "weights/ref" in {event.get("kind") for event in events}
    assert "weights/ref" not in {event.get("kind") for event in fewer_events}


ON_GPU = ("model=bench_1b", "platform=cuda", "offload=train")


@pytest.mark.parametrize("memory", ["full", "lean", "rebuild"])
def test_without_kl_the_plan_has_no_reference(memory):
    whole, less = (
        footprint_of(
            config_of("model=bench_1b", "platform=cuda", "offload=train", f"memory={memory}", *kl), vocab_size=32768
        )
        for kl in ((), NO_KL)
    )
    count = whole.parameter_counts["actor"]
    assert "weights/ref" in {holding.kind for holding in whole.of_role("actor")}
    assert "weights/ref" not in {holding.kind for holding in less.of_role("actor")}
    saved = whole.host_asleep_bytes("actor") - less.host_asleep_bytes("actor")
    assert saved / count == pytest.approx(2, rel=1e-3)
    (start,) = [moment for moment in less.moments if moment.name == "start critic from actor"]
    asleep = less.moments[-1].host_bytes
    copied = 2 * count if memory == "rebuild" else 0  # no tag keeps the actor's own weights
    assert start.host_bytes == pytest.approx(asleep + copied, rel=1e-3)
    assert less.node_host_peak_bytes <= whole.node_host_peak_bytes


@pytest.mark.parametrize("memory", ["lean", "rebuild"])
@pytest.mark.parametrize("kl", [(), NO_KL], ids=["reference", "none"])
def test_the_critic_starts_from_the_actor_with_and_without_a_reference(memory, kl):
    run = worker.build(small_config(f"memory={memory}", *kl), Phases(lambda record: None, gpu=False))
    loop.warm_up(run, loop.Outputs(None, None, None))
    weights = []
    for role in (run.actor, run.critic):
        with role.awake():
            weights.append(weights_of(role))
    actor, critic = weights
    bodies = [name for name in critic if not name.startswith("output_layer")]
    assert bodies
    assert all((actor[name] == critic[name]).all() for name in bodies)
    assert run.actor.further_tags == ([] if kl else ["ref"])


def test_a_checkpoint_without_a_reference_is_refused_where_one_is_needed(tmp_path):
    with_kl, without_kl = small_config(), small_config(*NO_KL)
    checkpoint = save(tmp_path, 1, config=without_kl, actor_tags=())
    assert folder.starting_point(without_kl, tmp_path) == checkpoint
    for config in (with_kl, small_config(*NO_KL, "algo.kl.target=0.1")):
        with pytest.raises(
            ValueError, match=r"no reference model: .*Go on from it with algo.kl.coef=0 algo.kl.target="
        ):
            folder.starting_point(config, tmp_path)
