"""The policy losses beside PPO's, and PPO's among them: hand-computed values and gradients, padding, bad settings."""

import math

import pytest
import torch

from tests.helpers.composing import GROUPS, config_of
from tests.helpers.policy_losses import policy_tokens
from trainer.algo.policy_losses import Cispo, Gspo, Ppo, Sapo
from trainer.config.pieces import make_policy_loss

LOSSES = {
    "ppo": Ppo(clip_low=0.2, clip_high=0.3, dual_clip=3.0, log_ratio_clamp=20.0),
    "gspo": Gspo(clip_low=0.2, clip_high=0.3, log_ratio_clamp=20.0),
    "cispo": Cispo(clip_low=1.0, clip_high=0.5, log_ratio_clamp=20.0),
    "sapo": Sapo(tau_positive=1.0, tau_negative=2.0, log_ratio_clamp=20.0),
}


def computed(loss, ratios, advantages, mask=None):
    """ratios and advantages [b][s] -> (losses, gradients by log-probs, statistics); every old log-prob is -1."""
    ratios, advantages = (torch.tensor(x, dtype=torch.float64) for x in (ratios, advantages))
    log_probs = (ratios.log() - 1).requires_grad_()
    mask = torch.ones_like(ratios, dtype=torch.bool) if mask is None else torch.tensor(mask)
    tokens = policy_tokens(torch.full_like(ratios, -1.0), advantages=advantages, response_mask=mask)
    per_token, stats = loss.compute(log_probs, tokens)
    per_token.sum().backward()
    return per_token.detach(), log_probs.grad, {name: x.item() for name, x in stats.items()}


def test_every_option_of_the_group_is_here():
    assert GROUPS["policy_loss"] == sorted(LOSSES)
    for name, loss in LOSSES.items():
        assert type(make_policy_loss(config_of(f"policy_loss={name}"))) is type(loss)


def test_gspo_by_hand():
    """Two tokens of ratio 4 and 1 share s = 2; of 1.21 and 1 s = 1.1, within the bounds."""
    found, gradient, stats = computed(
        LOSSES["gspo"], [[4.0, 1.0], [1.21, 1.0], [4.0, 1.0]], [[1.0] * 2, [1.0] * 2, [-1.0] * 2]
    )
    assert found[0].tolist() == pytest.approx([-1.3] * 2)  # clipped at 1 + clip_high
    assert gradient[0].tolist() == [0.0, 0.0]
    assert found[1].tolist() == pytest.approx([-1.1] * 2)
    assert gradient[1].tolist() == pytest.approx([-1.1] * 2)  # s A of each token: summed and over 2, that of s A
    assert found[2].tolist() == pytest.approx([2.0] * 2)
    assert gradient[2].tolist() == pytest.approx([2.0] * 2)
    assert stats["clip_fraction_high"] == 2
    assert stats["clip_fraction_low"] == 0
    assert stats["ratio_max"] == pytest.approx(2.0)


def test_the_gradient_of_gspo_is_that_of_the_sequence_ratio():
    """With one advantage per response and the mean over its tokens (arXiv:2507.18071 eq. 5), holes left out."""
    loss, mask = LOSSES["gspo"], torch.tensor([[True, False, True, True]])
    log_probs = torch.tensor([[-1.0, -9.0, -2.0, -0.7]], dtype=torch.float64, requires_grad=True)
    old = torch.tensor([[-1.1, -1.0, -1.9, -0.8]], dtype=torch.float64)
    tokens = policy_tokens(old, advantages=torch.full((1, 4), 0.5, dtype=torch.float64), response_mask=mask)
    (loss.compute(log_probs, tokens)[0].sum() / 3).backward()
    again = log_probs.detach().clone().requires_grad_()
    (-0.5 * ((again - old)[mask].sum() / 3).exp()).backward()
    torch.testing.assert_close(log_probs.grad, again.grad)


def test_cispo_by_hand():
    ratios, advantages = [[0.5, 1.0, 4.0, 4.0]], [[2.0, 2.0, 2.0, -1.0]]
    found, gradient, stats = computed(LOSSES["cispo"], ratios, advantages)
    weights = [0.5, 1.0, 1.5, 1.5]  # at most 1 + clip_high
    log_probs = [math.log(r) - 1 for r in ratios[0]]
    expected = [-w * a for w, a in zip(weights, advantages[0], strict=True)]
    assert gradient[0].tolist() == pytest.approx(expected)  # none is 0, clipped or not
    assert found[0].tolist() == pytest.approx([e * p for e, p in zip(expected, log_probs, strict=True)])
    assert (stats["clip_fraction_low"], stats["clip_fraction_high"]) == (0, 2)


def test_sapo_by_hand():
    sigmoid = lambda x: 1 / (1 + math.exp(-x))  # noqa: E731
    found, gradient, stats = computed(LOSSES["sapo"], [[1.0, 3.0, 3.0]], [[1.0, 1.0, -1.0]])
    # -A 4 / tau sigmoid(tau (r - 1)); tau is 1 where A > 0, else 2
    assert found[0].tolist() == pytest.approx([-2.0, -4 * sigmoid(2), 2 * sigmoid(4)])
    # by log r: -A 4 sigmoid (1 - sigmoid) r, which is -A at r = 1 whatever tau
    slope = [4 * s * (1 - s) for s in (sigmoid(0), sigmoid(2), sigmoid(4))]
    assert gradient[0].tolist() == pytest.approx([-slope[0], -3 * slope[1], 3 * slope[2]])
    assert slope[0] == 1.0
    assert stats["ratio"] == pytest.approx(7.0)


@pytest.mark.parametrize("name", LOSSES)
def test_at_the_sampling_policy_every_loss_is_the_plain_policy_gradient(name):
    advantages = [[0.5, -2.0, 3.0], [1.0, 0.0, -1.0]]
    _, gradient, stats = computed(LOSSES[name], [[1.0] * 3] * 2, advantages)
    torch.testing.assert_close(gradient, -torch.tensor(advantages, dtype=torch.float64))
    assert stats["ppo_kl"] == 0
    assert stats["ratio_max"] == 1
    assert stats["ratio"] == 6


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("padding", [math.nan, math.inf, -1e30])
def test_padding_reaches_neither_values_nor_gradients(name, padding):
    mask = torch.tensor([[True, True, False]])
    log_probs = torch.tensor([[-1.0, -1.2, padding]], requires_grad=True)
    old, advantages = torch.tensor([[-1.1, -1.0, padding]]), torch.tensor([[1.0, -1.0, padding]])
    found, stats = LOSSES[name].compute(log_probs, policy_tokens(old, advantages=advantages, response_mask=mask))
    found.sum().backward()
    assert found[0, 2] == 0
    assert log_probs.grad[0, 2] == 0
    assert all(x.isfinite() for x in stats.values())
    short = torch.tensor([[-1.0, -1.2]], requires_grad=True)
    cut = policy_tokens(old[:, :2], advantages=advantages[:, :2], response_mask=mask[:, :2])
    expected, _ = LOSSES[name].compute(short, cut)
    expected.sum().backward()
    assert torch.equal(found[:, :2], expected)
    assert torch.equal(log_probs.grad[:, :2], short.grad)


@pytest.mark.parametrize(
    ("name", "setting"),
    [
        *((name, "clip_low=1.5") for name in ("ppo", "gspo", "cispo")),
        *((name, f"clip_high={x}") for name, x in (("ppo", -0.1), ("gspo", math.nan), ("cispo", math.inf))),
        *((name, "log_ratio_clamp=-1") for name in LOSSES),
        *(("ppo", f"dual_clip={x}") for x in (1.0, math.nan)),
        *(("sapo", f"{side}=0") for side in ("tau_positive", "tau_negative")),
    ],
)
def test_settings_that_mean_nothing_are_refused(name, setting):
    with pytest.raises(ValueError, match=f"policy_loss.{setting.partition('=')[0]}="):
        config_of(f"policy_loss={name}", f"policy_loss.{setting}")
