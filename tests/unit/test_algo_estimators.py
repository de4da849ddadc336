"""Advantages without a critic, by hand; the contract that every estimator keeps."""

import dataclasses
import math

import pytest
import torch

from trainer.algo.estimators import DecoupledGae, Experience, Gae, Grpo, ReinforcePlusPlus, Rloo, ScoredResponses, Vapo
from trainer.algo.groups import group_statistics

NAN = math.nan
GAE = Gae(gamma=1.0, lam=1.0, bootstrap_truncated=False)
WITHOUT_CRITIC = [
    Grpo(divide_by_std=True),
    Grpo(divide_by_std=False),
    Rloo(),
    ReinforcePlusPlus(gamma=1.0, group_baseline=False),
    ReinforcePlusPlus(gamma=0.5, group_baseline=True),
]


def experience(scores, *, group_size, lengths=None, kl=0.0, padding=0.0, columns=3):
    """Responses of these lengths with these scores; `kl` is taken off every token's reward."""
    lengths = [2] * len(scores) if lengths is None else lengths
    mask = torch.arange(columns)[None] < torch.tensor(lengths)[:, None]
    rewards = torch.full(mask.shape, -kl)
    for row, (length, score) in enumerate(zip(lengths, scores, strict=True)):
        if length:
            rewards[row, length - 1] += score
    return ScoredResponses(
        rewards=rewards.where(mask, padding),
        response_mask=mask,
        scores=torch.tensor(scores),
        truncated=torch.zeros(len(scores), dtype=torch.bool),
        group_size=group_size,
    )


def advantages(estimator, *arguments, **keywords):
    return estimator.estimate(experience(*arguments, **keywords)).advantages


def of_sequences(values, length=2):
    return [[value] * length + [0.0] * (3 - length) for value in values]


def test_grpo_by_hand():
    """Rewards 3, 0, 0 of one question: mean 1, deviation sqrt((4 + 1 + 1) / 2) = sqrt(3); 1, 1, 1 of the other."""
    found = advantages(Grpo(divide_by_std=True), [3.0, 0.0, 0.0, 1.0, 1.0, 1.0], group_size=3)
    root = math.sqrt(3)
    torch.testing.assert_close(found, torch.tensor(of_sequences([2 / root, -1 / root, -1 / root, 0.0, 0.0, 0.0])))
    found = advantages(Grpo(divide_by_std=False), [3.0, 0.0, 0.0, 1.0, 1.0, 1.0], group_size=3)
    torch.testing.assert_close(found, torch.tensor(of_sequences([2.0, -1.0, -1.0, 0.0, 0.0, 0.0])))


def test_rloo_by_hand():
    """Others of 3, 0, 0 have the means 0, 1.5, 1.5."""
    found = advantages(Rloo(), [3.0, 0.0, 0.0], group_size=3)
    torch.testing.assert_close(found, torch.tensor(of_sequences([3.0, -1.5, -1.5])))


def test_rloo_takes_the_kl_of_the_whole_response():
    """Lengths 1 and 3 at 0.1 a token: rewards 0.9 and -0.3, so each is 1.2 from the other."""
    found = advantages(Rloo(), [1.0, 0.0], group_size=2, lengths=[1, 3], kl=0.1)
    torch.testing.assert_close(found, torch.tensor([[1.2, 0.0, 0.0], [-1.2, -1.2, -1.2]]))


def test_reinforce_plus_plus_by_hand():
    """Three tokens at 0.1 each, score 1: to go from the last 0.9, then 0.8, 0.7; with gamma 0.5 0.9, 0.35, 0.075."""
    rows = {"group_size": 2, "lengths": [3, 1], "kl": 0.1}
    found = advantages(ReinforcePlusPlus(gamma=1.0, group_baseline=False), [1.0, 0.0], **rows)
    torch.testing.assert_close(found, torch.tensor([[0.7, 0.8, 0.9], [-0.1, 0.0, 0.0]]))
    found = advantages(ReinforcePlusPlus(gamma=0.5, group_baseline=False), [1.0, 0.0], **rows)
    torch.testing.assert_close(found, torch.tensor([[0.075, 0.35, 0.9], [-0.1, 0.0, 0.0]]))
    found = advantages(ReinforcePlusPlus(gamma=1.0, group_baseline=True), [1.0, 0.0], **rows)
    torch.testing.assert_close(found, torch.tensor([[0.2, 0.3, 0.4], [-0.6, 0.0, 0.0]]))


@pytest.mark.parametrize("estimator", WITHOUT_CRITIC, ids=repr)
@pytest.mark.parametrize("padding", [0.0, 1e6, NAN])
def test_padding_and_empty_responses_reach_nobody(estimator, padding):
    lengths = [2, 3, 0, 0, 0, 1]
    results = [
        advantages(estimator, [1.0, 0.0, score, score, score, 1.0], group_size=3, lengths=lengths, padding=garbage)
        for score, garbage in ((0.0, 0.0), (50.0, padding))
    ]
    assert torch.equal(*results)
    assert not results[0][torch.tensor(lengths) == 0].any()
    assert not results[0][0, 2:].any()


@pytest.mark.parametrize("estimator", [e for e in WITHOUT_CRITIC if e.smallest_group > 1], ids=repr)
@pytest.mark.parametrize("score", [0.1, 0.7, 1e-20, 1e6])
def test_equal_scores_give_exactly_nothing(estimator, score):
    """0.1 seven times does not sum to 0.7 in float32, and what is left of it must not be divided by a deviation."""
    assert not advantages(estimator, [score] * 14, group_size=7).any()


def test_a_deviation_far_below_the_mean_still_counts():
    found = group_statistics(torch.tensor([1.0, 1.001]), valid=torch.tensor([True, True]), group_size=2)
    assert found.centred.tolist() == pytest.approx([-0.0005, 0.0005], rel=1e-4)
    assert found.count.tolist() == [2, 2]


def test_gae_ends_a_truncated_response_with_the_critics_value_on_demand():
    given = experience([1.0, 1.0], group_size=1)
    values = {"values": torch.zeros(2, 3), "last_values": torch.tensor([5.0, 7.0])}
    given = ScoredResponses(**{**vars(given), **values, "truncated": torch.tensor([True, False])})
    assert GAE.estimate(given).returns.tolist() == of_sequences([1.0, 1.0])
    bootstrapping = Gae(gamma=1.0, lam=1.0, bootstrap_truncated=True)
    assert bootstrapping.estimate(given).returns.tolist() == of_sequences([6.0, 1.0])


def test_who_needs_what():
    assert [e.needs_critic for e in (GAE, *WITHOUT_CRITIC)] == [True, *[False] * 5]
    assert [e.smallest_group for e in (GAE, *WITHOUT_CRITIC)] == [1, 2, 2, 2, 1, 2]


@pytest.mark.parametrize(
    ("estimator", "name"),
    [
        (Gae(gamma=1.1, lam=1.0, bootstrap_truncated=False), "advantages.gamma=1.1"),
        (Gae(gamma=1.0, lam=-0.1, bootstrap_truncated=False), "advantages.lam=-0.1"),
        (ReinforcePlusPlus(gamma=2.0, group_baseline=False), "advantages.gamma=2.0"),
    ],
)
def test_fields_are_judged(estimator, name):
    with pytest.raises(ValueError, match=f"^{name}: must be between 0 and 1$"):
        estimator.validate()


def test_an_estimator_elsewhere_may_import_the_former_name_of_its_input():
    assert Experience is ScoredResponses


# ---- lambdas of their own --------------------------------------------------------------------------------------------


def with_values(values, **keywords):
    found = experience(**keywords)
    return dataclasses.replace(found, values=torch.tensor(values), last_values=torch.zeros(len(values)))


def test_the_critic_may_have_a_lambda_of_its_own():
    """Values 0.5 and 0.25, reward 1 on the last token: deltas -0.25 and 0.75. At lambda 0.5 the first advantage is
    -0.25 + 0.5 * 0.75 = 0.125; at lambda 1 both returns are 1."""
    given = with_values([[0.5, 0.25, NAN]], scores=[1.0], group_size=1)
    decoupled = DecoupledGae(gamma=1.0, lam=0.5, critic_lam=1.0, bootstrap_truncated=False).estimate(given)
    assert decoupled.advantages.tolist() == [[0.125, 0.75, 0.0]]
    assert decoupled.returns.tolist() == [[1.0, 1.0, 0.0]]
    same = DecoupledGae(gamma=0.9, lam=0.5, critic_lam=0.5, bootstrap_truncated=False).estimate(given)
    plain = Gae(gamma=0.9, lam=0.5, bootstrap_truncated=False).estimate(given)
    assert torch.equal(same.advantages, plain.advantages)
    assert torch.equal(same.returns, plain.returns)


def test_vapos_lambda_grows_with_the_length():
    """alpha 0.5: lambda is 0 for two tokens, and 1 - 1 / 1.5 = 1/3 for three; never less than 0 (one token: 0)."""
    given = with_values(
        [[0.5, 0.25, NAN], [0.5, 0.25, 0.0], [0.5, NAN, NAN]],
        scores=[1.0, 1.0, 1.0], lengths=[2, 3, 1], group_size=1,
    )  # fmt: skip
    found = Vapo(gamma=1.0, alpha=0.5, critic_lam=1.0, bootstrap_truncated=False).estimate(given)
    assert found.advantages[0].tolist() == [-0.25, 0.75, 0.0]
    last = [-0.25 + (-0.25 + 1 / 3) / 3, -0.25 + 1 / 3, 1.0]
    assert found.advantages[1].tolist() == pytest.approx(last)
    assert found.advantages[2].tolist() == [0.5, 0.0, 0.0]
    assert found.returns.tolist() == [[1.0, 1.0, 0.0], [1.0, 1.0, 1.0], [1.0, 0.0, 0.0]]


def test_of_short_and_long_responses_each_has_its_own_lambda():
    given = with_values([[0.5, 0.25, 0.0]] * 2, scores=[1.0, 1.0], lengths=[3, 3], group_size=1)
    found = Vapo(gamma=0.9, alpha=1.0, critic_lam=0.3, bootstrap_truncated=True).estimate(given)
    plain = DecoupledGae(gamma=0.9, lam=2 / 3, critic_lam=0.3, bootstrap_truncated=True).estimate(given)
    torch.testing.assert_close(found.advantages, plain.advantages)
    torch.testing.assert_close(found.returns, plain.returns)


@pytest.mark.parametrize(
    ("estimator", "setting"),
    [
        (DecoupledGae(gamma=1.0, lam=1.0, critic_lam=1.5, bootstrap_truncated=False), "critic_lam"),
        (DecoupledGae(gamma=1.0, lam=NAN, critic_lam=1.0, bootstrap_truncated=False), "lam"),
        (Vapo(gamma=1.0, alpha=0.0, critic_lam=1.0, bootstrap_truncated=False), "alpha"),
        (Vapo(gamma=-1.0, alpha=1.0, critic_lam=1.0, bootstrap_truncated=False), "gamma"),
    ],
)
def test_settings_outside_their_limits_are_refused(estimator, setting):
    with pytest.raises(ValueError, match=f"advantages.{setting}="):
        estimator.validate()
