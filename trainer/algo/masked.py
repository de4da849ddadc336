"""Reductions over the valid tokens of `[b, s]` tensors; everything else in this package is built on them."""

import torch
import torch.distributed as dist
from torch import Tensor

# Spread below this fraction of the root mean square is what rounding leaves of equal float32 values.
RELATIVE_SPREAD_FLOOR = 1e-6


def zero_padding(x: Tensor, *, mask: Tensor) -> Tensor:
    """`x` with zeros where `mask` is False, in float32 or, if `x` is wider, in its own dtype.

    Apply it to the *inputs* of a formula: selecting afterwards keeps the value clean but not the gradient.
    """
    return torch.where(mask, x.to(torch.promote_types(x.dtype, torch.float32)), 0.0)


def divide_or_zero(numerator: Tensor, denominator: Tensor) -> Tensor:
    """`numerator / denominator` for counts: zero, with zero gradient, where the count is zero."""
    return torch.where(denominator > 0, numerator / denominator.clamp(min=1), 0.0)


def masked_sum(x: Tensor, *, mask: Tensor) -> Tensor:
    """Sum of `x` over the True positions of `mask`, a scalar."""
    return zero_padding(x, mask=mask).sum()


@torch.no_grad()
def whiten(x: Tensor, *, mask: Tensor, group: dist.ProcessGroup | None = None) -> Tensor:
    """Shift and scale the valid tokens of all ranks in `group` to mean 0 and variance 1; zero off `mask`.

    Args:
        x: [b, s], each rank its own shape.
        mask: [b, s] bool; a rank without a single True still takes part in both collectives.
        group: the data-parallel group (with context parallelism, the one that includes it). None: only
            this rank.

    The variance is the biased one (divided by n, not n - 1), so one token is no special case. It is taken in
    float64 around the mean (two passes). No epsilon is added, so the result does not depend on the unit of
    the rewards; instead the result is exactly zero where the tokens are equal up to float32 rounding, and
    where there are none.
    """
    kept = zero_padding(x, mask=mask)
    wide = kept.double()
    total_and_count = torch.stack([wide.sum(), mask.sum().double()])
    if group is not None:
        dist.all_reduce(total_and_count, group=group)
    total, count = total_and_count
    mean = divide_or_zero(total, count)
    centred = torch.where(mask, wide - mean, 0.0)
    squares = centred.square().sum()
    if group is not None:
        dist.all_reduce(squares, group=group)
    deviation = divide_or_zero(squares, count).sqrt()
    is_flat = deviation <= RELATIVE_SPREAD_FLOOR * torch.hypot(mean, deviation)
    return torch.where(is_flat, 0.0, centred / deviation).to(kept.dtype)


@torch.no_grad()
def centre(x: Tensor, *, valid: Tensor, group: dist.ProcessGroup | None = None) -> Tensor:
    """Shift `x` [n] so that the mean of its `valid` [n] bool entries on all ranks in `group` is 0; zero elsewhere.

    The mean is taken in float64, so equal float32 values become exactly 0.
    """
    wide = zero_padding(x.double(), mask=valid)
    total_and_count = torch.stack([wide.sum(), valid.sum().double()])
    if group is not None:
        dist.all_reduce(total_and_count, group=group)
    return zero_padding((wide - divide_or_zero(*total_and_count)).to(x.dtype), mask=valid)


def moment_sums(x: Tensor, *, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Sum and sum of squares of the valid tokens: detached float64 scalars that add up over ranks."""
    wide = zero_padding(x.detach().double(), mask=mask)
    return wide.sum(), wide.square().sum()


def variance_from_sums(*, count: float, total: float, square_total: float) -> float:
    """Biased variance out of added-up `moment_sums`; 0.0 for no tokens, or if it drowns in rounding."""
    if count == 0:
        return 0.0
    mean_square = square_total / count
    variance = mean_square - (total / count) ** 2
    return variance if variance > RELATIVE_SPREAD_FLOOR**2 * mean_square else 0.0


def explained_variance(
    *, count: float, returns: float, returns_square: float, residual: float, residual_square: float
) -> float:
    """1 - Var(returns - values) / Var(returns), from the sums that `value_loss` reports.

    1 is a perfect critic, 0 no better than a constant, negative worse. Undefined for constant returns: 0.0.
    """
    returns_variance = variance_from_sums(count=count, total=returns, square_total=returns_square)
    residual_variance = variance_from_sums(count=count, total=residual, square_total=residual_square)
    return 1.0 - residual_variance / returns_variance if returns_variance else 0.0
