import math

import pytest
import torch

from tests.helpers.policy_losses import policy_tokens
from trainer.algo.kl import kl_estimate
from trainer.algo.losses import LOSS_AGGREGATIONS, aggregate, value_loss
from trainer.algo.masked import divide_or_zero, explained_variance
from trainer.algo.policy_losses import Ppo

NAN = math.nan


def policy_loss(log_probs, *, old_log_probs, advantages, response_mask, **fields):
    """PPO's, of these tokens."""
    tokens = policy_tokens(old_log_probs, advantages=advantages, response_mask=response_mask)
    return Ppo(**fields).compute(log_probs, tokens)


PPO = {"clip_low": 0.2, "clip_high": 0.3, "dual_clip": None, "log_ratio_clamp": 20.0}


def floats(stats):
    return {name: x.item() for name, x in stats.items()}


def one_token_losses(ratios, advantages, **options):
    log_probs = torch.tensor([ratios], dtype=torch.float64).log().requires_grad_()
    loss, stats = policy_loss(
        log_probs,
        old_log_probs=torch.zeros_like(log_probs),
        advantages=torch.tensor([advantages], dtype=torch.float64),
        response_mask=torch.ones(1, len(ratios), dtype=torch.bool),
        **{**PPO, **options},
    )
    loss.sum().backward()
    return loss[0].tolist(), log_probs.grad[0].tolist(), floats(stats)


def test_policy_loss_by_hand():
    #                   free  low ok  low clip  high ok  high clip  worse
    ratios, advantages = [1.0, 0.5, 0.5, 2.0, 2.0, 1.1], [2.0, 1.0, -1.0, -1.0, 1.0, -3.0]
    loss, gradient, stats = one_token_losses(ratios, advantages)
    assert loss == pytest.approx([-2.0, -0.5, 0.8, 2.0, -1.3, 3.3])
    assert gradient == pytest.approx([-2.0, -0.5, 0.0, 2.0, 0.0, 3.3])  # d/d log r = -A r
    assert stats == pytest.approx(
        {
            "clip_fraction_low": 1,
            "clip_fraction_high": 1,
            "clip_fraction_dual": 0,
            "ratio": 7.1,
            "ratio_max": 2.0,
            "ppo_kl": -math.log(1.1),  # 2 * ln 2 - 2 * ln 2 - ln 1.1
        }
    )


def test_dual_clip_by_hand():
    loss, gradient, stats = one_token_losses([2.0, 4.0, 4.0], [-1.0, -1.0, 1.0], dual_clip=3.0)
    assert loss == pytest.approx([2.0, 3.0, -1.3])
    assert gradient == pytest.approx([2.0, 0.0, 0.0])
    assert stats["clip_fraction_dual"] == 1
    assert stats["clip_fraction_high"] == 1


def test_log_ratio_clamp_keeps_everything_finite():
    loss, gradient, stats = one_token_losses([math.exp(300), math.exp(-300)], [-1.0, 1.0], log_ratio_clamp=2.0)
    assert loss == pytest.approx([math.exp(2), -math.exp(-2)])
    assert gradient == [0.0, 0.0]
    assert stats["ppo_kl"] == pytest.approx(0.0, abs=1e-9)  # -300 + 300, not clamped


def test_first_step_is_the_plain_policy_gradient_with_ppo_kl_exactly_zero():
    log_probs = -torch.rand(3, 5, generator=torch.Generator().manual_seed(0))
    leaf = log_probs.clone().requires_grad_()
    advantages = torch.randn(3, 5, generator=torch.Generator().manual_seed(1))
    loss, stats = policy_loss(
        leaf,
        old_log_probs=log_probs,
        advantages=advantages,
        response_mask=torch.ones(3, 5, dtype=torch.bool),
        **{**PPO, "dual_clip": 3.0},
    )
    loss.sum().backward()
    assert torch.equal(leaf.grad, -advantages)
    assert floats(stats) == {
        "clip_fraction_low": 0,
        "clip_fraction_high": 0,
        "clip_fraction_dual": 0,
        "ratio": 15,
        "ratio_max": 1,
        "ppo_kl": 0,
    }


def value_case(value_clip):
    #                 inside  clip matters  clip is on the good side
    values = torch.tensor([[0.5, 2.0, 2.0]], requires_grad=True)
    loss, stats = value_loss(
        values,
        old_values=torch.tensor([[0.0, 0.0, 0.0]]),
        returns=torch.tensor([[1.0, 3.0, -1.0]]),
        response_mask=torch.ones(1, 3, dtype=torch.bool),
        value_clip=value_clip,
    )
    loss.sum().backward()
    return loss.tolist(), values.grad.tolist(), floats(stats)


def test_value_loss_by_hand():
    # errors -0.5, -1, 3; the second clipped to 1: error -2; the third clipped to 1: error 2, smaller
    loss, gradient, stats = value_case(1.0)
    assert loss == [[0.125, 2.0, 4.5]]
    assert gradient == [[-0.5, 0.0, 3.0]]
    assert stats == {
        "value_clip_fraction": 1,
        "values": 4.5,
        "returns": 3.0,
        "returns_square": 11.0,
        "residual": 0.5 + 1 - 3,
        "residual_square": 0.25 + 1 + 9,
    }


def test_value_loss_without_clip_is_half_the_squared_error():
    loss, gradient, stats = value_case(None)
    assert loss == [[0.125, 0.5, 4.5]]
    assert gradient == [[-0.5, -1.0, 3.0]]
    assert stats["value_clip_fraction"] == 0


def test_value_clip_is_not_counted_for_rounding():
    generator = torch.Generator().manual_seed(0)
    old_values, step, returns = torch.randn(3, 1, 1000, generator=generator)
    _, stats = value_loss(
        old_values + 0.01 * step.clamp(-1, 1),
        old_values=old_values,
        returns=returns,
        response_mask=torch.ones(1, 1000, dtype=torch.bool),
        value_clip=0.02,
    )
    assert stats["value_clip_fraction"] == 0


def losses_with_padding(padding, mask):
    """Both losses, their stats and gradients, for inputs that hold `padding` off the mask."""
    generator = torch.Generator().manual_seed(0)

    def padded():
        return torch.where(mask, torch.randn(mask.shape, generator=generator), padding)

    log_probs, values = padded().requires_grad_(), padded().requires_grad_()
    actor_loss, actor_stats = policy_loss(
        log_probs,
        old_log_probs=padded(),
        advantages=padded(),
        response_mask=mask,
        **{**PPO, "dual_clip": 3.0},
    )
    critic_loss, critic_stats = value_loss(
        values, old_values=padded(), returns=padded(), response_mask=mask, value_clip=0.5
    )
    kl = kl_estimate(log_probs, ref_log_probs=padded(), response_mask=mask, estimator="k3", clamp=None)
    numerators = [
        aggregate(x, mask=mask, mode=mode, fixed_length=7)[0]
        for x in (actor_loss, critic_loss, kl)
        for mode in LOSS_AGGREGATIONS
    ]
    torch.stack(numerators).sum().backward()
    return [actor_loss, critic_loss, log_probs.grad, values.grad, *numerators], {
        **actor_stats,
        **critic_stats,
    }


@pytest.mark.parametrize("padding", [1e6, -1e6, math.inf, NAN])
def test_padding_changes_no_bit(padding):
    mask = torch.tensor([[True, False, True, False], [False] * 4, [True, True, True, True]])
    tensors, stats = losses_with_padding(padding, mask)
    expected_tensors, expected_stats = losses_with_padding(0.0, mask)
    assert all(torch.equal(a, b) for a, b in zip(tensors, expected_tensors, strict=True))
    assert floats(stats) == floats(expected_stats)
    assert all(not x[~mask].any() for x in tensors[:4])


@pytest.mark.parametrize("padding", [0.0, 1e6, NAN])
def test_fully_masked_batch_is_all_zero(padding):
    tensors, stats = losses_with_padding(padding, torch.zeros(2, 3, dtype=torch.bool))
    assert all(not x.any() for x in tensors)
    assert set(floats(stats).values()) == {0.0}
    sums = {name: x.item() for name, x in stats.items() if name.startswith(("returns", "residual"))}
    assert explained_variance(count=0, **sums) == 0.0


def test_fully_masked_step_leaves_weights_unchanged():
    weight = torch.ones(3, requires_grad=True)
    mask = torch.zeros(2, 3, dtype=torch.bool)
    for mode in LOSS_AGGREGATIONS:
        divide_or_zero(*aggregate(weight.expand(2, 3), mask=mask, mode=mode, fixed_length=7)).backward()
    torch.optim.SGD([weight], lr=1.0).step()
    assert torch.equal(weight, torch.ones(3))


def test_aggregate_by_hand():
    loss = torch.tensor([[1.0, 3.0, NAN], [5.0, NAN, NAN], [NAN, NAN, NAN]])
    mask = torch.tensor([[True, True, False], [True, False, False], [False] * 3])
    numerator, denominator = aggregate(loss, mask=mask, mode="token_mean")
    assert (numerator.item(), denominator.item()) == (9.0, 3)
    numerator, denominator = aggregate(loss, mask=mask, mode="sequence_mean")
    assert (numerator.item(), denominator.item()) == (2.0 + 5.0, 2)
    numerator, denominator = aggregate(loss, mask=mask, mode="fixed_length", fixed_length=4)
    assert (numerator.item(), denominator.item()) == (9.0 / 4, 2)


def test_unknown_aggregation():
    with pytest.raises(ValueError, match=r"'mean'.*token_mean, sequence_mean.*algo\.loss_aggregation="):
        aggregate(torch.zeros(1, 1), mask=torch.ones(1, 1, dtype=torch.bool), mode="mean")


LENGTHS = [1, 3, 50, 200]
SPLITS = {  # dp rank -> micro-batches -> rows
    "1 rank x 2": [[[0, 1], [2, 3]]],
    "1 rank x 4": [[[0], [1], [2], [3]]],
    "2 ranks x 1": [[[0, 3]], [[1, 2]]],
    "2 ranks x 2": [[[0], [1]], [[2], [3]]],
    "2 ranks, uneven": [[[0]], [[1], [2, 3]]],
}


def gradients_of_split(split, mode):
    """Weight gradients and summed stats of a linear actor and critic, rows shared as `split` says."""
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(4, 200, 3, generator=generator, dtype=torch.float64)
    old_log_probs, advantages, old_values, returns = torch.randn(4, 4, 200, generator=generator, dtype=torch.float64)
    mask = torch.arange(200)[None] < torch.tensor(LENGTHS)[:, None]
    weight = torch.full((2, 3), 0.3, dtype=torch.float64, requires_grad=True)
    micro_batches = [rows for rank in split for rows in rank]
    denominator = sum(aggregate(returns[rows], mask=mask[rows], mode=mode, fixed_length=7)[1] for rows in micro_batches)
    totals = {}
    for rank in split:
        for rows in rank:
            width = max(LENGTHS[row] for row in rows)  # each micro-batch pads to its own longest row
            cut = (rows, slice(width))
            log_probs, values = (features[cut] @ weight.T).unbind(-1)
            options = {"response_mask": mask[cut]}
            actor_loss, actor_stats = policy_loss(
                log_probs, old_log_probs=old_log_probs[cut], advantages=advantages[cut], **options, **PPO
            )
            critic_loss, critic_stats = value_loss(
                values, old_values=old_values[cut], returns=returns[cut], value_clip=0.2, **options
            )
            numerator, _ = aggregate(actor_loss + critic_loss, mask=mask[cut], mode=mode, fixed_length=7)
            (numerator / denominator).backward()  # the all-reduce over ranks sums, and so does .grad here
            for name, x in {**actor_stats, **critic_stats}.items():
                before = totals.get(name, 0.0)
                totals[name] = max(before, x.item()) if name.endswith("_max") else before + x.item()
    return weight.grad, totals


@pytest.mark.parametrize("mode", LOSS_AGGREGATIONS)
@pytest.mark.parametrize("split", SPLITS.values(), ids=SPLITS.keys())
def test_gradients_do_not_depend_on_the_split(split, mode):
    gradient, totals = gradients_of_split(split, mode)
    expected_gradient, expected_totals = gradients_of_split([[[0, 1, 2, 3]]], mode)
    torch.testing.assert_close(gradient, expected_gradient, rtol=1e-12, atol=1e-14)
    assert totals == pytest.approx(expected_totals, rel=1e-12)
    assert totals["clip_fraction_low"] > 0
    assert totals["value_clip_fraction"] > 0


def test_gradcheck_away_from_the_kinks():
    generator = torch.Generator().manual_seed(3)
    log_probs, old, advantages = torch.randn(3, 2, 4, generator=generator, dtype=torch.float64)
    mask = torch.tensor([[True, True, False, True], [True, True, True, False]])
    log_probs.requires_grad_()
    assert torch.autograd.gradcheck(
        lambda x: policy_loss(x, old_log_probs=old, advantages=advantages, response_mask=mask, **PPO)[0],
        log_probs,
    )
    assert torch.autograd.gradcheck(
        lambda x: value_loss(x, old_values=old, returns=advantages, response_mask=mask, value_clip=0.5)[0],
        log_probs,
    )
