"""Which roles an algorithm has, what is refused, and how the learning rate moves."""

import pytest
import torch

from tests.helpers.checkpoints import save
from tests.helpers.composing import choices_and_config_of, config_of, error_of, footprint_of, suggested
from trainer.checkpoint import folder
from trainer.plan import make_plan
from trainer.plan.footprint import plan_rows

NO_CRITIC = ("~role@roles.critic", "~model@roles.critic.model", "~optimizer@roles.critic.optimizer")
ALGORITHMS = {"ppo": "gae", "grpo": "grpo", "rloo": "rloo", "reinforce_pp": "reinforce_pp"}


@pytest.mark.parametrize("algo", ALGORITHMS)
def test_an_algorithm_alone_brings_its_estimator_and_its_roles(algo):
    chosen, config = choices_and_config_of(f"algo={algo}")
    assert chosen["advantages"] == ALGORITHMS[algo]
    roles = ["actor", "critic"] if algo == "ppo" else ["actor"]
    assert list(config.roles) == roles
    assert {row.role for row in make_plan(config).rows} == set(roles)
    prediction = footprint_of(config, vocab_size=300)
    assert {row["role"] for row in plan_rows(prediction)} == {*roles, "engine"}
    assert not [moment for moment in prediction.moments if "critic" in moment.name and algo != "ppo"]


def test_the_users_choice_wins_over_the_algorithms():
    assert config_of("algo=grpo", "advantages=rloo").advantages["_target_"].endswith(".Rloo")
    assert config_of("algo=grpo", "algo.kl.coef=0.5").algo.kl.coef == 0.5
    assert list(config_of("algo=grpo", *NO_CRITIC[:1]).roles) == ["actor"]  # said twice
    assert list(config_of("advantages=rloo", *NO_CRITIC, "algo.value_clip=null").roles) == ["actor"]


@pytest.mark.parametrize(
    ("overrides", "message", "suggestions"),
    [
        (["algo=grpo", "advantages=gae"], "Gae needs a critic, and roles has none: use algo=ppo", ["algo=ppo"]),
        ([*NO_CRITIC], "Gae needs a critic, and roles has none", ["algo=grpo", "algo=rloo", "algo=reinforce_pp"]),
        (["advantages=grpo"], "Grpo needs no critic, but roles has one", ["algo=grpo"]),
        (["~role@roles.critic"], "roles.critic has nothing from the group role:", []),
        (["algo=grpo", "role@roles.critic=critic"], "roles.critic has nothing from the group model:", []),
        (["algo=grpo", "algo.value_clip=0.2"], "algo.value_clip=0.2 means nothing", ["algo.value_clip=null"]),
        (["algo=grpo", "algo.critic_warmup_steps=2"], "=2 means nothing", ["algo.critic_warmup_steps=0"]),
        (
            ["algo=grpo", "algo.start_critic_from_actor=true"],
            "=true means nothing",
            ["algo.start_critic_from_actor=null"],
        ),
        (["algo=rloo", "algo.responses_per_prompt=1"], "at least 2", ["algo.responses_per_prompt=2"]),
        (["optimizer.lr_schedule=wsd"], "lr_wsd_decay_steps=null with lr_schedule=wsd", []),
        (
            [
                *("optimizer.lr_schedule=wsd", "optimizer.lr_warmup_steps=20", "optimizer.lr_wsd_decay_steps=41"),
                *("algo.num_steps=60", "algo.minibatches=1"),
            ],
            "that trains the actor) 20 warm up. Use a number up to 40",
            ["optimizer.lr_wsd_decay_steps=8"],
        ),
        (["advantages._target_=nowhere.Mine"], "advantages._target_=nowhere.Mine cannot be imported", []),
        (
            ["advantages._target_=trainer.tasks.arithmetic.ArithmeticTask"],
            "is no dataclass derived from trainer.algo.estimators.AdvantageEstimator",
            [],
        ),
        (["+advantages.foo=1"], "advantages.foo is not a setting of trainer.algo.estimators.Gae; it takes gamma", []),
        (["algo=rloo", "+advantages.foo=1"], "Rloo; it takes none", []),
    ],
)
def test_what_does_not_go_together_is_refused_with_a_way_out(overrides, message, suggestions):
    error = error_of(*overrides)
    assert message in error
    if suggestions:
        assert set(suggestions) <= set(suggested(error))
        key = suggestions[0].partition("=")[0]
        rest = [o for o in overrides if o.partition("=")[0] not in (key, "advantages") and o not in NO_CRITIC]
        config_of(*rest, suggestions[0])


def test_a_checkpoint_without_a_critic_is_no_start_for_an_algorithm_with_one(tmp_path):
    ppo, grpo = config_of("algo.num_steps=9"), config_of("algo=grpo", "algo.num_steps=9")
    save(tmp_path / "grpo", 3, config=grpo, roles=["actor"])
    save(tmp_path / "ppo", 3, config=ppo)
    with pytest.raises(ValueError, match=r"has no critic.*Go on from it with algo=grpo"):
        folder.starting_point(ppo, tmp_path / "grpo")
    assert folder.starting_point(grpo, tmp_path / "grpo") == tmp_path / "grpo" / "checkpoints" / "step_3"
    assert folder.starting_point(grpo, tmp_path / "ppo") == tmp_path / "ppo" / "checkpoints" / "step_3"


# Ten steps at most 1, at least 0.2, the first two warm up: what each schedule gives before each of them.
DECAYING = [1 - 0.8 * k / 8 for k in range(9)]
SCHEDULES = {
    ("constant",): [1 / 3, 2 / 3, *[1.0] * 9],
    ("linear",): [1 / 3, 2 / 3, *DECAYING],
    ("cosine",): [1 / 3, 2 / 3, 1, 0.96955, 0.88284, 0.75307, 0.6, 0.44693, 0.31716, 0.23045, 0.2],
    ("wsd", "linear"): [1 / 3, 2 / 3, *[1.0] * 5, 0.8, 0.6, 0.4, 0.2],
    ("wsd", "minus_sqrt"): [1 / 3, 2 / 3, *[1.0] * 5, 0.6, 1 - 0.8 * 0.5**0.5, 1 - 0.8 * 0.75**0.5, 0.2],
    ("wsd", "exponential"): [1 / 3, 2 / 3, *[1.0] * 5, 0.2 + 0.8 * (2 * 0.5**0.25 - 1), 0.2 + 0.8 * (2 * 0.5**0.5 - 1),
                             0.2 + 0.8 * (2 * 0.5**0.75 - 1), 0.2],
    ("wsd", "cosine"): [1 / 3, 2 / 3, *[1.0] * 5, 0.88284, 0.6, 0.31716, 0.2],
}  # fmt: skip


@pytest.mark.parametrize("schedule", SCHEDULES, ids="-".join)
def test_learning_rates_by_hand(schedule):
    from trainer.megatron.optimizer import build_scheduler

    style = [f"optimizer.lr_wsd_decay_style={schedule[1]}", "optimizer.lr_wsd_decay_steps=4"] if schedule[1:] else []
    config = config_of(
        *(f"optimizer.lr_schedule={schedule[0]}", "optimizer.lr_warmup_steps=2", "optimizer.min_lr_ratio=0.2"),
        *("roles.actor.optimizer.lr=1", *style),
    )
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=7.0)
    scheduler = build_scheduler(optimizer, config.roles["actor"], total_steps=10)
    rates = []
    for _ in range(11):
        rates.append(optimizer.param_groups[0]["lr"])
        scheduler.step(1)
    assert rates == pytest.approx(SCHEDULES[schedule], abs=1e-5)
