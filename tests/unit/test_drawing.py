"""Dynamic sampling, what long responses are paid, and what a reward function may know of a response."""

import sys
from types import ModuleType

import pytest
import torch

from tests.helpers.composing import config_of
from tests.helpers.recording import recorded
from tests.helpers.roles import credited, fresh_saver, make_batch, small_config
from trainer import loop, worker
from trainer.algo.shaping import overlong_penalty
from trainer.config.pieces import make_task
from trainer.data.batch import joined
from trainer.data.rewards import Payer, check_rewards, reply_to
from trainer.measure.phases import Phases
from trainer.tasks import Example, Reply, ResponseInfo
from trainer.training.drawing import draw

pytestmark = pytest.mark.usefixtures("saver")
PLAIN = ("advantages.gamma=1", "advantages.lam=1", "algo.whiten_advantages=false", "algo.centre_scores=false")


def built(*overrides, pays=None):
    fresh_saver()
    run = worker.build(small_config(*overrides), Phases(lambda record: None, gpu=False))
    if pays is not None:
        run.prompts.replies = lambda said, examples, infos, payer: [Reply(pays(example)) for example in examples]
    return run


class OneOfTwo:
    """Pays the two responses to a question 1 and 0 if it is one of ``good``, else both alike."""

    def __init__(self, is_good):
        self.is_good, self.calls = is_good, 0

    def __call__(self, example):
        self.calls += 1
        return float(self.is_good(example) and self.calls % 2)


def drawn_of(run):
    return draw(run.config, run.prompts, run.engine, step=1, is_judged=False)


def groups_with_spread(batch):
    return (batch.scores.view(-1, 2).std(1) > 0).sum().item()


def test_without_it_the_engine_draws_once():
    drawn = drawn_of(built(pays=OneOfTwo(lambda example: False)))
    assert (drawn.rounds, drawn.drawn_groups, drawn.flat_groups) == (1, 8, 8)


def test_groups_without_a_spread_give_their_places_to_others():
    is_good = lambda example: example.metadata["operation"] == "plus"  # noqa: E731
    run = built("algo.dynamic_sampling_rounds=20", pays=OneOfTwo(is_good))
    first = [is_good(example) for example in run.prompts.for_step(1)[::2]]
    drawn = drawn_of(run)
    assert 0 < sum(first) < 8
    assert groups_with_spread(drawn.batch) == 8
    assert len(drawn.batch) == 16
    assert 1 < drawn.rounds < 20
    assert drawn.drawn_groups == 8 * drawn.rounds
    assert drawn.flat_groups >= 8 - sum(first)
    plain = drawn_of(built(pays=OneOfTwo(is_good))).batch
    kept = torch.tensor(first).repeat_interleave(2)  # those that taught something stay where they were
    width = min(plain.tokens.shape[1], drawn.batch.tokens.shape[1])
    assert torch.equal(drawn.batch.tokens[kept, :width], plain.tokens[kept, :width])
    assert torch.equal(drawn.batch.response_mask[kept, : width - 1], plain.response_mask[kept, : width - 1])


def test_rounds_are_limited_and_what_is_not_found_stays():
    run = built("algo.dynamic_sampling_rounds=2", pays=OneOfTwo(lambda example: False))
    drawn = drawn_of(run)
    assert (drawn.rounds, drawn.drawn_groups, drawn.flat_groups) == (3, 24, 24)
    plain = drawn_of(built(pays=OneOfTwo(lambda example: False))).batch
    assert torch.equal(drawn.batch.tokens, plain.tokens)


def test_later_rounds_have_questions_of_their_own_which_a_resumed_run_has_too():
    prompts = built().prompts
    rounds = [[e.question for e in prompts.for_step(2, round_number=n)[::2]] for n in range(3)]
    assert rounds[0] != rounds[1] != rounds[2]
    assert rounds[2] == [e.question for e in built().prompts.for_step(2, round_number=2)[::2]]


def test_rounds_are_in_the_metrics():
    outputs, records = recorded()
    loop.train(built("algo.dynamic_sampling_rounds=1", pays=OneOfTwo(lambda example: False)), outputs)
    assert [record["sampling/rounds"] for record in records[1:]] == [2.0, 2.0]
    assert records[1]["sampling/groups"] == 16
    assert records[1]["sampling/flat_group_fraction"] == records[1]["flat_group_fraction"] == 1.0


def test_batches_are_joined_at_the_longest_row():
    short, long = (
        make_batch([2, 1], scores=torch.tensor([1.0, 2.0])),
        make_batch([5], seed=1, scores=torch.tensor([3.0])),
    )
    both = joined([short, long], pad=7)
    assert both.tokens.shape == (3, long.tokens.shape[1])
    assert torch.equal(both.tokens[:2, : short.tokens.shape[1]], short.tokens)
    assert both.tokens[:2, short.tokens.shape[1] :].eq(7).all()
    assert not both.response_mask[:2, short.response_mask.shape[1] :].any()
    assert torch.equal(both.response_mask[2:], long.response_mask)
    assert both.scores.tolist() == [1.0, 2.0, 3.0]


# ---- long responses --------------------------------------------------------------------------------------------------


def test_the_overlong_penalty_by_hand():
    """Limit 10, buffer 4: none up to 6 tokens, then a quarter more for each (arXiv:2503.14476 eq. 13)."""
    found = overlong_penalty(torch.tensor([0, 5, 6, 7, 8, 9, 10]), limit=10, buffer=4)
    assert found.tolist() == [0, 0, 0, -0.25, -0.5, -0.75, -1]


def test_a_long_response_is_paid_less():
    run = built("algo.overlong.penalty=0.5", "algo.overlong.buffer=4", pays=lambda example: 1.0)
    batch = drawn_of(run).batch  # of up to 4 tokens
    tokens = batch.response_mask.sum(1)
    assert batch.scores.tolist() == pytest.approx((1 - 0.5 * tokens / 4).tolist())
    assert batch.scores.min() == 0.5


def test_truncated_responses_teach_the_actor_nothing_where_they_are_masked():
    batch = make_batch([3, 3], truncated=torch.tensor([True, False]), scores=torch.tensor([1.0, 1.0]))
    values = torch.zeros(2, batch.tokens.shape[1])
    plain, masked = (credited(batch, values, *PLAIN, f"algo.overlong.mask={x}") for x in (False, True))
    assert plain.advantages[0].any()
    assert not masked.advantages[0].any()
    assert torch.equal(masked.advantages[1], plain.advantages[1])


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["algo.overlong.penalty=1"], "algo.overlong.buffer=0 with algo.overlong.penalty=1.0"),
        (["algo.overlong.penalty=1", "algo.overlong.buffer=9"], "so from 1 to 8"),
        (["algo.dynamic_sampling_rounds=1", "algo.responses_per_prompt=1"], "one response has no spread"),
        (["algo.dynamic_sampling_rounds=-1"], "algo.dynamic_sampling_rounds=-1: must be between 0"),
    ],
)
def test_what_cannot_work_is_refused(overrides, message):
    with pytest.raises(ValueError, match=message):
        config_of("rollout.max_new_tokens=8", "algo.micro_batch_size=1", *overrides)


# ---- clipping and the target KL --------------------------------------------------------------------------------------


def test_rewards_and_advantages_are_clipped():
    batch = make_batch([2, 1], scores=torch.tensor([5.0, -0.5]))
    values = torch.zeros(2, batch.tokens.shape[1])
    mask = batch.response_mask
    rewards = credited(batch, values, *PLAIN, "algo.reward_clip=2")
    assert rewards.returns[mask].tolist() == [2.0, 2.0, -0.5]
    advantages = credited(batch, values, *PLAIN, "algo.advantage_clip=1")
    assert advantages.advantages[mask].tolist() == [1.0, 1.0, -0.5]
    assert advantages.returns[mask].tolist() == [5.0, 5.0, -0.5]


def test_updates_stop_behind_the_target_kl_and_the_learning_rate_goes_on():
    common = ("algo.epochs=3", "roles.actor.optimizer.lr=3e-2", "optimizer.lr_schedule=linear")
    records = {}
    for name, target in (("all", "null"), ("few", "1e-9")):
        outputs, found = recorded()
        run = built(*common, f"algo.target_kl={target}", pays=OneOfTwo(lambda example: True))
        loop.train(run, outputs)
        records[name] = found[1:]
    assert [record["actor/updates"] for record in records["all"]] == [6.0, 6.0]
    assert all(1 < record["actor/updates"] < 6 for record in records["few"])
    assert [r["actor/lr"] for r in records["few"]] == [r["actor/lr"] for r in records["all"]]


# ---- rewards that know more than the text ----------------------------------------------------------------------------


def reward_module(monkeypatch, **functions):
    module = ModuleType("informed_rewards")
    vars(module).update(functions)
    monkeypatch.setitem(sys.modules, "informed_rewards", module)


def test_a_reward_function_may_take_token_count_and_truncation(monkeypatch):
    def three(response, example, info):
        return info.token_count + 100 * info.truncated

    def two(response, example):
        return 0.5

    def with_a_default(response, example, scale=2.0):
        return scale

    reward_module(monkeypatch, three=three, two=two, with_a_default=with_a_default)
    example, info = Example("1 + 1 =", "2"), ResponseInfo(token_count=7, truncated=True)
    for name, expected in (("three", 107.0), ("two", 0.5), ("with_a_default", 2.0)):
        config = config_of(f"reward=informed_rewards.{name}")
        assert reply_to(config, make_task(config), ["2"], example, info, payer=Payer.REWARD) == Reply(expected)
        check_rewards(config, make_task(config))


def test_it_gets_those_of_the_responses(monkeypatch):
    reward_module(monkeypatch, tokens=lambda response, example, info: info.token_count + 100 * info.truncated)
    batch = drawn_of(built("reward=informed_rewards.tokens")).batch
    expected = batch.response_mask.sum(1) + 100 * batch.truncated
    assert batch.scores.tolist() == expected.tolist()
    assert batch.truncated.any()
