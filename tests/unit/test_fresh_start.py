"""RL starts with an optimizer of its own, and where all responses are paid alike it leaves the policy as it is."""

import pytest
import torch

from tests.helpers.invariance_worker import run_one
from tests.helpers.recording import recorded
from tests.helpers.roles import fresh_saver, make_role, same_weights, small_config, train, weights_of
from trainer import loop, worker
from trainer.measure.phases import Phases
from trainer.tasks import Reply

pytestmark = pytest.mark.usefixtures("saver")
STEPS = ("algo.warmup_steps=4", "algo.num_steps=3")


def built(*overrides, pays=lambda text: 0.3):
    run = worker.build(small_config(*STEPS, *overrides), Phases(lambda record: None, gpu=False))
    run.prompts.replies = lambda said, examples, infos, payer: [Reply(pays(texts[-1])) for texts in said]
    return run


def records_of(*overrides):
    """Of a run whose responses are paid by their lengths."""
    outputs, records = recorded()
    loop.train(built(*overrides, pays=lambda text: float(len(text) % 2)), outputs)
    return records


def kept(role, tag=None):
    with role.awake(tag=tag):
        return weights_of(role)


@pytest.mark.parametrize("policy", ["lean", "rebuild"])
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_a_restarted_optimizer_takes_the_step_that_a_new_one_takes(policy, dtype):
    overrides = (f"memory={policy}", f"model.dtype={dtype}")
    used = make_role("actor", *overrides)
    train(used, steps=3)
    used.sleep()
    used.wake_up()
    used.load_weights(weights_of(used))  # of main params: what is in the weights, as a new role has it
    before = weights_of(used)
    used.restart_optimizer()
    assert used.model.step_count() == 0
    used.sleep()
    used.wake_up()
    train(used, steps=1)
    assert used.model.step_count() == 1
    fresh_saver()
    new = make_role("actor", *overrides)
    new.load_weights(before)
    train(new, steps=1)
    assert same_weights(weights_of(used), weights_of(new))
    assert not same_weights(before, weights_of(new))


@pytest.mark.parametrize("algo", ["ppo", "grpo", "rloo", "reinforce_pp"])
def test_a_constant_reward_moves_nothing(algo):
    """Not by a bit: neither what the warm-up left in Adam's moments nor a critic that still learns the constant."""
    run = built(f"algo={algo}", "algo.epochs=2")
    loop.train(run, loop.Outputs(None, None, None))
    assert same_weights(kept(run.actor), kept(run.actor, tag="ref"))


def test_a_reward_that_differs_does_move_it():
    run = built("algo=ppo", pays=lambda text: float(len(text) % 2))
    loop.train(run, loop.Outputs(None, None, None))
    assert not same_weights(kept(run.actor), kept(run.actor, tag="ref"))


def test_the_first_step_has_a_learning_rate_of_its_warm_up():
    records = run_one(small_config("optimizer.lr_warmup_steps=3", "algo.minibatches=1", *STEPS))["metrics"]
    lr = small_config().roles["actor"].optimizer.lr
    assert [record["actor/lr"] / lr for record in records[1:]] == pytest.approx([0.5, 0.75, 1.0])


def test_the_kl_coefficient_stays_while_only_the_critic_trains():
    adaptive = ("algo.kl.target=0.01", "algo.kl.horizon=16", "algo.critic_warmup_steps=2", "algo.num_steps=4")
    records = run_one(small_config(*adaptive))["metrics"]
    coefs = [record["kl_coef"] for record in records[1:]]
    assert coefs[:3] == [coefs[0]] * 3
    assert coefs[3] != coefs[0]
    assert "actor/loss" not in records[2]


def test_the_parts_of_the_actors_loss_add_up():
    as_loss = ("algo.kl.placement=loss", "algo.kl.estimator=k3+", "algo.kl.coef=0.5", "algo.entropy_coef=0.01")
    record = records_of(*as_loss, "roles.actor.optimizer.lr=1e-2")[-1]
    parts = [record[f"actor/{part}_loss"] for part in ("policy", "kl", "entropy")]
    assert all(part != 0 for part in parts)
    assert record["actor/loss"] == pytest.approx(sum(parts), rel=1e-4)
    assert record["actor/entropy_loss"] == pytest.approx(-0.01 * record["entropy"], rel=0.2)
    assert record["actor/ratio_max"] > record["actor/ratio"]


def test_advantages_are_logged_before_and_after_whitening():
    record = records_of("algo.whiten_advantages=true")[-1]
    assert record["trained_advantage_mean"] == pytest.approx(0.0, abs=1e-6)
    assert record["trained_advantage_std"] == pytest.approx(1.0, abs=1e-3)
    assert record["advantage_std"] != pytest.approx(1.0, abs=1e-3)


def test_the_gap_of_the_engine_sees_top_p():
    gaps = {}
    for top_p in (1.0, 0.5):
        fresh_saver()
        config = small_config(f"rollout.top_p={top_p}", "model.dtype=fp32")
        gaps[top_p] = run_one(config)["metrics"][1]["rollout_log_prob_gap"]
    assert gaps[1.0] < 1e-4
    assert gaps[0.5] > 0.1  # about -log 0.5


def test_an_evaluation_may_draw_responses_too():
    outputs, records = recorded()
    run = built("algo.evaluation_samples=3", "algo.heldout_prompts=4", "algo.num_steps=0")
    verdicts = [Reply(1.0), Reply(0.0), Reply(0.0)]
    run.prompts.replies = lambda said, examples, infos, payer: verdicts[: len(said)] * (len(said) // min(len(said), 3))
    run.prompts.heldout = lambda count: run.prompts.environment.heldout[:2]
    loop.train(run, outputs)
    (record,) = records
    assert record["heldout_accuracy"] == 0.5  # greedy: 1, 0
    assert record["heldout_avg@3"] == pytest.approx(1 / 3)
    assert record["heldout_pass@3"] == 1.0
    assert record["heldout_pass@3_se"] == 0.0


@pytest.mark.parametrize("mode", ["token_mean", "sequence_mean"])
def test_the_critics_loss_is_aggregated_by_a_setting_of_its_own(mode):
    from tests.helpers.roles import loss_of, make_batch
    from trainer.training import step
    from trainer.training.micro_batches import Split

    batch = make_batch([1, 4])
    sums = {
        name: step.train_minibatch(
            role := make_role(name), batch, loss_of(role, f"algo.critic_loss_aggregation={mode}"), split=Split(2)
        )
        for name in ("actor", "critic")
    }
    assert sums["actor"]["loss_count"] == 5
    assert sums["critic"]["loss_count"] == {"token_mean": 5, "sequence_mean": 2}[mode]


def test_scores_are_centred_over_the_responses_that_have_tokens():
    from trainer.algo.masked import centre

    valid = torch.tensor([True, True, False, True])
    assert centre(torch.tensor([1.0, 2.0, 9.0, 6.0]), valid=valid).tolist() == [-2.0, -1.0, 0.0, 3.0]
    assert centre(torch.full((7,), 0.1), valid=torch.ones(7, dtype=torch.bool)).tolist() == [0.0] * 7
