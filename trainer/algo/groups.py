"""Groups of responses to one question: rows k * g up to (k + 1) * g - 1 of an [n] tensor."""

from typing import NamedTuple

import torch
from torch import Tensor

from trainer.algo.masked import RELATIVE_SPREAD_FLOOR, divide_or_zero, zero_padding


class GroupStatistics(NamedTuple):
    """Per row [n]: its distance from the mean of its group, the group's standard deviation (n - 1 below, as in
    ``torch.std``; 0 for fewer than two rows), and how many rows counted."""

    centred: Tensor
    deviation: Tensor
    count: Tensor


def group_statistics(x: Tensor, *, valid: Tensor, group_size: int) -> GroupStatistics:
    """Of ``x`` [n], in float64. Rows that are not ``valid`` [n] bool take no part and are 0, and so are all rows of a
    group that are equal up to float32 rounding: what is divided by a deviation later must not be noise."""
    assert len(x) % group_size == 0, (x.shape, group_size)
    mask = valid.view(-1, group_size)
    wide = zero_padding(x.double(), mask=valid).view(-1, group_size)
    count = mask.sum(1, keepdim=True)
    mean = divide_or_zero(wide.sum(1, keepdim=True), count)
    centred = zero_padding(wide - mean, mask=mask)
    deviation = divide_or_zero(centred.square().sum(1, keepdim=True), count - 1).sqrt()
    is_flat = deviation <= RELATIVE_SPREAD_FLOOR * torch.hypot(mean, deviation)
    centred, deviation = centred.masked_fill(is_flat, 0.0), deviation.masked_fill(is_flat, 0.0)
    return GroupStatistics(*(value.expand_as(wide).reshape(-1) for value in (centred, deviation, count)))
