"""From scores of responses and their turns to rewards, advantages and returns per token. Nothing here has gradients."""

import torch
from torch import Tensor

from trainer.algo.masked import zero_padding


@torch.no_grad()
def token_rewards(scores: Tensor, *, turn_rewards: Tensor, kl: Tensor, response_mask: Tensor, kl_coef: float) -> Tensor:
    """Reward per token: -kl_coef * KL on every token, plus the score on the last (arXiv:1909.08593 eq. 2), less what of
    it stands on earlier tokens.

    Args:
        scores: [b], one per response, of all its turns. The score of a row without valid tokens has no token to land
            on and is dropped.
        turn_rewards: [b, s], what of the score is paid on earlier tokens: on the last one of each turn but the last.
        kl: [b, s] estimate of the KL to the reference; left as it is, so that it can be logged.
        response_mask: [b, s] bool.
        kl_coef: 0 for "no KL in the reward".

    Returns:
        [b, s], zero off the mask. Advantages and returns both derive from it, so actor and critic see the
        same KL.
    """
    paid = zero_padding(turn_rewards, mask=response_mask)
    paid = paid + score_on_last_token(scores - paid.sum(1), response_mask=response_mask)
    return paid - kl_coef * zero_padding(kl, mask=response_mask)


def score_on_last_token(scores: Tensor, *, response_mask: Tensor) -> Tensor:
    """[b] per response -> [b, s]: on its last valid token, zero elsewhere."""
    valid_from_here = response_mask.flip(1).cumsum(1).flip(1)
    is_last = response_mask & (valid_from_here == 1)
    return zero_padding(scores[:, None].expand_as(is_last), mask=is_last)


@torch.no_grad()
def rewards_to_go(rewards: Tensor, *, response_mask: Tensor, gamma: float) -> Tensor:
    """[b, s]: the rewards from each valid token on, the k-th valid one after it times gamma^k; zero off the mask."""
    kept = zero_padding(rewards, mask=response_mask)
    decay = torch.full_like(kept, gamma).masked_fill_(~response_mask, 1.0)
    return zero_padding(_discounted_suffix_sum(kept, decay=decay), mask=response_mask)


@torch.no_grad()
def gae(
    rewards: Tensor,
    *,
    values: Tensor,
    response_mask: Tensor,
    terminal_values: Tensor,
    gamma: float,
    lam: float | Tensor,
) -> tuple[Tensor, Tensor]:
    """Generalized advantage estimation over response tokens (arXiv:1506.02438 eq. 16).

        delta_t = r_t + gamma V_{t+1} - V_t
        A_t = delta_t + gamma lam A_{t+1}
        return_t = A_t + V_t

    t + 1 is the next *valid* token: holes take no part, as if the row had been compacted first.

    Args:
        rewards: [b, s], see `token_rewards`.
        values: [b, s], V of the state before token t.
        response_mask: [b, s] bool.
        terminal_values: [b], V of the state after the last valid token. The rule: 0 for a response that
            finished (nothing follows). For one that the rollout recorded as truncated: the critic's value of
            the state after its last token if the user bootstraps, else 0. Whether it was truncated is
            recorded, never read off padding.
        gamma, lam: discount and lambda, per token; lambda also as [b], one for each response.

    Returns:
        (advantages, returns), each [b, s], zero off the mask. `returns` is what the critic learns:
        the TD(lambda) target.
    """
    values = zero_padding(values, mask=response_mask)
    values_and_terminal = torch.cat([values, terminal_values[:, None].to(values.dtype)], dim=1)
    next_values = values_and_terminal.gather(1, _next_valid_column(response_mask))
    deltas = zero_padding(rewards + gamma * next_values - values, mask=response_mask)
    row_lam = torch.as_tensor(lam, dtype=deltas.dtype, device=deltas.device).view(-1, 1)
    decay = (gamma * row_lam).expand_as(deltas).masked_fill(~response_mask, 1.0)
    advantages = zero_padding(_discounted_suffix_sum(deltas, decay=decay), mask=response_mask)
    return advantages, advantages + values


def _next_valid_column(mask: Tensor) -> Tensor:
    """[b, s] index of the first valid column right of each column; s where there is none."""
    rows, columns = mask.shape
    here = torch.where(mask, torch.arange(columns, device=mask.device), columns)
    padded = torch.cat([here, here.new_full((rows, 1), columns)], dim=1)
    return padded.flip(1).cummin(1).values.flip(1)[:, 1:]


def _discounted_suffix_sum(x: Tensor, *, decay: Tensor) -> Tensor:
    """y_t = x_t + decay_t y_{t+1} along dim 1, in log2(s) vector operations instead of s.

    The scan of Hillis and Steele (1986): after each round y_t covers twice as many columns, and decay_t is
    the product over them.
    """
    y, decay, reach = x.clone(), decay.clone(), 1
    while reach < y.shape[1]:
        y[:, :-reach] += decay[:, :-reach] * y[:, reach:]
        decay[:, :-reach] = decay[:, :-reach] * decay[:, reach:]
        reach *= 2
    return y
