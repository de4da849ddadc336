import math

import pytest
import torch

from tests.helpers.policy_losses import policy_tokens
from trainer.algo.advantages import token_rewards
from trainer.algo.kl import KL_ESTIMATORS, kl_estimate, next_kl_coef
from trainer.algo.losses import aggregate
from trainer.algo.policy_losses import Ppo

ONE = torch.ones(1, 1, dtype=torch.bool)


def test_estimators_by_hand():
    # d = ln 2: exp(-d) = 1/2
    d = math.log(2)
    #              value     gradient: 1, d, 1 - exp(-d); the straight-through forms have that of k2
    k1, k2, k3 = (d, 1), (d * d / 2, d), (0.5 - 1 + d, 0.5)
    expected = {"k1": k1, "k2": k2, "k3": k3, "k1+": (k1[0], d), "k3+": (k3[0], d)}
    assert tuple(expected) == KL_ESTIMATORS
    for estimator, (value, gradient) in expected.items():
        log_probs = torch.tensor([[-1.0]], requires_grad=True)
        kl = kl_estimate(
            log_probs,
            ref_log_probs=torch.tensor([[-1.0 - d]]),
            response_mask=ONE,
            estimator=estimator,
            clamp=None,
        )
        kl.sum().backward()
        assert kl.item() == pytest.approx(value, rel=1e-5)
        assert log_probs.grad.item() == pytest.approx(gradient, rel=1e-5)


@pytest.mark.parametrize("estimator", KL_ESTIMATORS)
def test_exactly_zero_where_actor_equals_ref(estimator):
    log_probs = -torch.rand(4, 9, generator=torch.Generator().manual_seed(0))
    mask = torch.ones(4, 9, dtype=torch.bool)
    kl = kl_estimate(log_probs, ref_log_probs=log_probs.clone(), response_mask=mask, estimator=estimator, clamp=None)
    assert torch.equal(kl, torch.zeros(4, 9))


@pytest.mark.parametrize("estimator", KL_ESTIMATORS)
@pytest.mark.parametrize("garbage", [1e6, -1e6, math.inf, math.nan])
def test_padding_reaches_neither_value_nor_gradient(estimator, garbage):
    log_probs = torch.tensor([[-1.0, garbage, -1.0, -3.0]], requires_grad=True)
    kl = kl_estimate(
        log_probs,
        ref_log_probs=torch.tensor([[-2.0, -1.0, garbage, garbage]]),
        response_mask=torch.tensor([[True, False, False, False]]),
        estimator=estimator,
        clamp=None,
    )
    kl.sum().backward()
    value = {"k1": 1, "k2": 0.5, "k3": math.exp(-1)}[estimator.removesuffix("+")]
    gradient = 1 - math.exp(-1) if estimator == "k3" else 1
    torch.testing.assert_close(kl, torch.tensor([[value, 0.0, 0.0, 0.0]], dtype=torch.float32))
    torch.testing.assert_close(log_probs.grad, torch.tensor([[gradient, 0.0, 0.0, 0.0]], dtype=torch.float32))


@pytest.mark.parametrize(
    ("estimator", "expected"), [("k1", -5.0), ("k2", 12.5), ("k3", math.exp(5) - 6), ("k3+", math.exp(5) - 6)]
)
def test_clamp_bounds_the_log_ratio(estimator, expected):
    log_probs = torch.tensor([[-200.0]], requires_grad=True)  # exp(199) overflows float32
    kl = kl_estimate(log_probs, ref_log_probs=torch.tensor([[-1.0]]), response_mask=ONE, estimator=estimator, clamp=5.0)
    kl.sum().backward()
    assert kl.item() == pytest.approx(expected)
    assert log_probs.grad.item() == 0.0


def test_unknown_estimator():
    with pytest.raises(ValueError, match=r"'k4'.*k1, k2, k3.*algo\.kl\.estimator="):
        kl_estimate(torch.zeros(1, 1), ref_log_probs=torch.zeros(1, 1), response_mask=ONE, estimator="k4", clamp=None)


REF = torch.tensor([0.1, 0.2, 0.3, 0.4], dtype=torch.float64).log()
ACTOR = torch.tensor([1.0, 0.5, -0.5, -1.0], dtype=torch.float64)


def exact_kl(logits):
    log_p = logits.log_softmax(-1)
    return (log_p.exp() * (log_p - REF)).sum()


def expected_gradient(loss_of_log_probs):
    """Gradient of E_{token ~ actor}[loss] with the sampling held fixed, as in a loss on samples."""
    logits = ACTOR.clone().requires_grad_()
    log_p = logits.log_softmax(-1)
    (log_p.detach().exp() * loss_of_log_probs(log_p)).sum().backward()
    return logits.grad


def kl_loss(log_p, estimator):
    mask = torch.ones(1, 4, dtype=torch.bool)
    return kl_estimate(log_p[None], ref_log_probs=REF[None], response_mask=mask, estimator=estimator, clamp=None)[0]


@pytest.mark.parametrize("estimator", KL_ESTIMATORS)
def test_expected_value_is_the_kl(estimator):
    log_p = ACTOR.log_softmax(-1)
    mean = (log_p.exp() * kl_loss(log_p, estimator)).sum()
    assert mean.item() > 0
    if estimator != "k2":  # k2 is biased
        torch.testing.assert_close(mean, exact_kl(ACTOR))


@pytest.mark.parametrize("estimator", ["k2", "k3", "k1+", "k3+"])
def test_step_on_the_kl_loss_moves_the_actor_towards_ref(estimator):
    gradient = expected_gradient(lambda log_p: kl_loss(log_p, estimator))
    assert exact_kl(ACTOR - 0.1 * gradient) < exact_kl(ACTOR) - 1e-3


def test_expected_gradients_are_what_the_module_says():
    logits = ACTOR.clone().requires_grad_()
    exact_kl(logits).backward()
    for estimator in ("k2", "k1+", "k3+"):
        torch.testing.assert_close(
            expected_gradient(lambda log_p, name=estimator: kl_loss(log_p, name)), logits.grad, msg=estimator
        )
    forward_kl_gradient = ACTOR.softmax(-1) - REF.exp()
    torch.testing.assert_close(expected_gradient(lambda log_p: kl_loss(log_p, "k3")), forward_kl_gradient)
    torch.testing.assert_close(
        expected_gradient(lambda log_p: kl_loss(log_p, "k1")), torch.zeros(4, dtype=torch.float64)
    )


def test_step_on_the_policy_loss_with_nothing_but_kl_in_the_reward_moves_the_actor_towards_ref():
    old = ACTOR.log_softmax(-1)
    column = torch.ones(4, 1, dtype=torch.bool)  # four one-token responses, one per token of the vocabulary
    kl = kl_loss(old, "k1")[:, None]
    rewards = token_rewards(torch.zeros(4), turn_rewards=torch.zeros_like(kl), kl=kl, response_mask=column, kl_coef=0.5)

    def loss_per_token(log_p):
        tokens = policy_tokens(old[:, None], advantages=rewards, response_mask=column)
        loss, _ = Ppo(clip_low=0.2, clip_high=0.2, dual_clip=None, log_ratio_clamp=20.0).compute(log_p[:, None], tokens)
        return loss[:, 0]

    gradient = expected_gradient(loss_per_token)
    assert exact_kl(ACTOR - 0.1 * gradient) < exact_kl(ACTOR) - 1e-3
    logits = ACTOR.clone().requires_grad_()
    exact_kl(logits).backward()
    torch.testing.assert_close(gradient, 0.5 * logits.grad)


def test_one_step_of_kl_loss_over_a_padded_batch_lowers_the_kl():
    logits = ACTOR.clone().requires_grad_()
    tokens = torch.tensor([[0, 0, 1], [1, 3, 3]])
    mask = torch.tensor([[True, True, True], [True, False, False]])
    kl = kl_estimate(
        logits.log_softmax(-1)[tokens],
        ref_log_probs=torch.where(mask, REF[tokens], math.nan),
        response_mask=mask,
        estimator="k2",
        clamp=10.0,
    )
    numerator, denominator = aggregate(kl, mask=mask, mode="token_mean")
    (numerator / denominator).backward()
    assert exact_kl(ACTOR - 0.1 * logits.grad) < exact_kl(ACTOR)


@pytest.mark.parametrize(
    ("observed", "expected"),
    [
        (6.0, 0.2),  # on target
        (6.6, 0.2 * (1 + 0.1 * 0.05)),  # 10 % above
        (5.7, 0.2 * (1 - 0.05 * 0.05)),  # 5 % below
        (600.0, 0.2 * (1 + 0.2 * 0.05)),  # clipped
        (-3.0, 0.2 * (1 - 0.2 * 0.05)),  # an estimate may be negative
        (math.nan, 0.2),
        (math.inf, 0.2),
    ],
)
def test_next_kl_coef(observed, expected):
    coef = next_kl_coef(0.2, observed=observed, target=6.0, horizon=10_000, batch_size=500)
    assert coef == pytest.approx(expected, rel=1e-12)
