import math

import pytest
import torch

from trainer.algo.advantages import gae, token_rewards
from trainer.algo.kl import kl_estimate

NAN = math.nan
GARBAGE = [0.0, 1e6, -1e6, NAN]
HOLES = torch.tensor([[True, False, True, True, False], [True, True, True, True, True], [False] * 5])


def paid(scores, *, kl, turn_rewards=None, **options):
    """Rewards per token, of one turn unless told otherwise."""
    return token_rewards(
        scores, turn_rewards=torch.zeros_like(kl) if turn_rewards is None else turn_rewards, kl=kl, **options
    )


@pytest.mark.parametrize("padding", GARBAGE)
def test_token_rewards_by_hand(padding):
    kl = torch.tensor([[0.5, padding, 1.0, 2.0, padding], [0.0, 1.0, 0.0, -1.0, 3.0], [padding] * 5])
    before = kl.clone()
    rewards = paid(torch.tensor([10.0, -1.0, padding]), kl=kl, response_mask=HOLES, kl_coef=0.1)
    expected = torch.tensor([[-0.05, 0.0, -0.1, 9.8, 0.0], [0.0, -0.1, 0.0, 0.1, -1.3], [0.0] * 5])
    torch.testing.assert_close(rewards, expected)
    assert torch.equal(kl.nan_to_num(7.0), before.nan_to_num(7.0))


def test_reward_of_an_empty_response_does_not_reach_the_others():
    kl, mask = torch.zeros(3, 5), HOLES
    with_score = paid(torch.tensor([1.0, 2.0, 1e6]), kl=kl, response_mask=mask, kl_coef=0.0)
    without = paid(torch.tensor([1.0, 2.0, 0.0]), kl=kl, response_mask=mask, kl_coef=0.0)
    assert torch.equal(with_score, without)
    assert with_score.sum() == 3.0


def test_batch_without_columns():
    mask = torch.zeros(2, 0, dtype=torch.bool)
    rewards = paid(torch.ones(2), kl=torch.zeros(2, 0), response_mask=mask, kl_coef=1.0)
    advantages, returns = gae(
        rewards,
        values=torch.zeros(2, 0),
        response_mask=mask,
        terminal_values=torch.ones(2),
        gamma=1.0,
        lam=1.0,
    )
    assert rewards.shape == advantages.shape == returns.shape == (2, 0)


@pytest.mark.parametrize("padding", GARBAGE)
def test_gae_by_hand_with_holes(padding):
    # valid tokens: r = 1, 0, 2; V = 0.5, 1, 2; V after the last = 4; gamma 0.5, lambda 0.5
    #   delta_3 = 2 + 0.5 * 4 - 2   =  2       A_3 =  2
    #   delta_2 = 0 + 0.5 * 2 - 1   =  0       A_2 =  0 + 0.25 * 2   = 0.5
    #   delta_1 = 1 + 0.5 * 1 - 0.5 =  1       A_1 =  1 + 0.25 * 0.5 = 1.125
    x = padding
    advantages, returns = gae(
        torch.tensor([[1.0, x, 0.0, x, x, 2.0, x]]),
        values=torch.tensor([[0.5, x, 1.0, x, x, 2.0, x]]),
        response_mask=torch.tensor([[True, False, True, False, False, True, False]]),
        terminal_values=torch.tensor([4.0]),
        gamma=0.5,
        lam=0.5,
    )
    assert torch.equal(advantages, torch.tensor([[1.125, 0.0, 0.5, 0.0, 0.0, 2.0, 0.0]]))
    assert torch.equal(returns, torch.tensor([[1.625, 0.0, 1.5, 0.0, 0.0, 4.0, 0.0]]))


def test_finished_and_truncated_differ_only_by_the_terminal_value():
    # one token, r = 1, V = 0.25, gamma 0.9: finished 1 - 0.25; truncated, V after it 2: 1 + 1.8 - 0.25
    advantages, returns = gae(
        torch.tensor([[1.0, 5.0], [1.0, 5.0]]),
        values=torch.tensor([[0.25, 5.0], [0.25, 5.0]]),
        response_mask=torch.tensor([[True, False], [True, False]]),
        terminal_values=torch.tensor([0.0, 2.0]),
        gamma=0.9,
        lam=0.3,
    )
    torch.testing.assert_close(advantages[:, 0], torch.tensor([0.75, 2.55]))
    torch.testing.assert_close(returns[:, 0], torch.tensor([1.0, 2.8]))


def compacted_gae(rewards, values, terminal_value, *, gamma, lam):
    """The textbook loop over one compacted response of Python floats."""
    advantages, next_value, advantage = [], terminal_value, 0.0
    for reward, value in zip(reversed(rewards), reversed(values), strict=True):
        advantage = reward + gamma * next_value - value + gamma * lam * advantage
        next_value = value
        advantages.append(advantage)
    return advantages[::-1]


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 1.0), (0.99, 0.95), (1.0, 0.0), (0.0, 1.0)])
@pytest.mark.parametrize("padding", [0.0, NAN])
def test_gae_equals_the_loop_over_compacted_tokens(gamma, lam, padding):
    generator = torch.Generator().manual_seed(0)
    rewards, values = torch.randn(2, 6, 201, generator=generator, dtype=torch.float64)
    terminal = torch.randn(6, generator=generator, dtype=torch.float64)
    lengths = torch.tensor([0, 1, 3, 50, 200, 201])[:, None]
    mask = (torch.arange(201) < lengths) & ((torch.rand(6, 201, generator=generator) < 0.7) | (lengths < 4))
    advantages, returns = gae(
        torch.where(mask, rewards, padding),
        values=torch.where(mask, values, padding),
        response_mask=mask,
        terminal_values=torch.where(mask.any(1), terminal, padding),
        gamma=gamma,
        lam=lam,
    )
    for row in range(6):
        keep = mask[row]
        expected = compacted_gae(
            rewards[row][keep].tolist(),
            values[row][keep].tolist(),
            terminal[row].item(),
            gamma=gamma,
            lam=lam,
        )
        expected = torch.tensor(expected, dtype=torch.float64)
        torch.testing.assert_close(advantages[row][keep], expected)
        torch.testing.assert_close(returns[row][keep], expected + values[row][keep])
    assert not advantages[~mask].any()
    assert not returns[~mask].any()


def test_more_padding_changes_no_bit():
    generator = torch.Generator().manual_seed(1)
    rewards, values = torch.randn(2, 3, 37, generator=generator)
    mask = torch.rand(3, 37, generator=generator) < 0.8
    options = {"terminal_values": torch.randn(3, generator=generator), "gamma": 0.99, "lam": 0.95}
    short = gae(rewards, values=values, response_mask=mask, **options)

    def widen(x):
        return torch.nn.functional.pad(x, (0, 100), value=1e6)

    wide_mask = torch.nn.functional.pad(mask, (0, 100))
    wide = gae(widen(rewards), values=widen(values), response_mask=wide_mask, **options)
    assert all(torch.equal(a, b[:, :37]) for a, b in zip(short, wide, strict=True))


def test_kl_in_the_reward_reaches_actor_and_critic_alike():
    log_probs, ref_log_probs = torch.tensor([[-1.0, -2.0]]), torch.tensor([[-1.5, -4.0]])
    mask = torch.ones(1, 2, dtype=torch.bool)
    kl = kl_estimate(log_probs, ref_log_probs=ref_log_probs, response_mask=mask, estimator="k1", clamp=None)  # 0.5, 2
    results = []
    for kl_coef in (0.0, 0.1):
        rewards = paid(torch.tensor([1.0]), kl=kl, response_mask=mask, kl_coef=kl_coef)
        results.append(
            gae(
                rewards,
                values=torch.zeros(1, 2),
                response_mask=mask,
                terminal_values=torch.zeros(1),
                gamma=1.0,
                lam=1.0,
            )
        )
    (advantages, returns), (advantages_kl, returns_kl) = results
    torch.testing.assert_close(advantages - advantages_kl, torch.tensor([[0.25, 0.2]]))
    torch.testing.assert_close(returns - returns_kl, torch.tensor([[0.25, 0.2]]))
