"""The critic's loss per token, with its statistics as sums, and how per-token losses become one number.

A statistic named `x` is the *sum* of x over the valid tokens of this call (detached float64): add over
micro-batches and ranks, then divide by the number of valid tokens.
"""

import torch
from torch import Tensor

from trainer.algo.masked import divide_or_zero, masked_sum, moment_sums, zero_padding

LOSS_AGGREGATIONS = ("token_mean", "sequence_mean", "fixed_length")


def value_loss(
    values: Tensor, *, old_values: Tensor, returns: Tensor, response_mask: Tensor, value_clip: float | None
) -> tuple[Tensor, dict[str, Tensor]]:
    """Half the squared error; with `value_clip` the larger of it and that of the value held near the old one.

        loss = max((V - R)^2, (clip(V, V_old - value_clip, V_old + value_clip) - R)^2) / 2

    Value clipping is not in the PPO paper but in its first implementation (openai/baselines, ppo2).

    Args:
        values, old_values, returns: [b, s]; gradients flow into the first only.
        response_mask: [b, s] bool.
        value_clip: > 0, in the unit of the returns; None: no clipping.

    Returns:
        loss [b, s], zero off the mask, and sums: `value_clip_fraction` (tokens whose gradient the bound
        removed), `values`, and what `explained_variance` needs: `returns`, `returns_square`, `residual`
        (returns - values), `residual_square`.
    """
    values = zero_padding(values, mask=response_mask)
    old_values = zero_padding(old_values.detach(), mask=response_mask)
    returns = zero_padding(returns.detach(), mask=response_mask)
    squared_error = (values - returns).square()
    is_clipped = torch.zeros_like(response_mask)
    if value_clip is not None:
        near_old = values.clamp(old_values - value_clip, old_values + value_clip)
        near_old_error = (near_old - returns).square()
        is_clipped = near_old_error > squared_error
        squared_error = torch.maximum(squared_error, near_old_error)
    stats = _sums({"value_clip_fraction": is_clipped, "values": values}, mask=response_mask)
    stats["returns"], stats["returns_square"] = moment_sums(returns, mask=response_mask)
    stats["residual"], stats["residual_square"] = moment_sums(returns - values, mask=response_mask)
    return 0.5 * squared_error, stats


def aggregate(
    loss_per_token: Tensor, *, mask: Tensor, mode: str, fixed_length: int | None = None
) -> tuple[Tensor, Tensor]:
    """(numerator, denominator), scalars: summed over micro-batches and ranks, they divide to the global mean.

    Args:
        loss_per_token: [b, s].
        mask: [b, s] bool.
        mode: "token_mean": every token weighs the same; sum over tokens, and their number. "sequence_mean":
            every response weighs the same; sum of the rows' means, and the number of rows with a valid token
            (GRPO, arXiv:2402.03300 eq. 3). "fixed_length": every token weighs the same, however many there are in
            the batch; sum over tokens divided by `fixed_length`, and that number of rows (Dr. GRPO,
            arXiv:2503.20783 section 3.1).
        fixed_length: the longest response there can be, for the last mode only.

    The numerator keeps its graph even if nothing is valid (its gradient is 0), so every rank can call
    backward. Divide by the *global* denominator before backward; use `divide_or_zero` where it may be 0.

    Raises:
        ValueError: unknown mode.
    """
    if mode == "token_mean":
        return masked_sum(loss_per_token, mask=mask), mask.sum()
    if mode == "sequence_mean":
        row_sums = zero_padding(loss_per_token, mask=mask).sum(1)
        return divide_or_zero(row_sums, mask.sum(1)).sum(), mask.any(1).sum()
    if mode == "fixed_length":
        assert fixed_length is not None
        return masked_sum(loss_per_token, mask=mask) / fixed_length, mask.any(1).sum()
    raise ValueError(
        f"unknown loss aggregation {mode!r}; allowed: {', '.join(LOSS_AGGREGATIONS)}; "
        "override algo.loss_aggregation=..."
    )


def _sums(stats: dict[str, Tensor], *, mask: Tensor) -> dict[str, Tensor]:
    return {name: masked_sum(x.detach().double(), mask=mask) for name, x in stats.items()}
