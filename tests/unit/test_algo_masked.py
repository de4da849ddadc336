import math

import pytest
import torch

from trainer.algo.masked import (
    divide_or_zero,
    explained_variance,
    masked_sum,
    moment_sums,
    variance_from_sums,
    whiten,
)

NAN = math.nan


def test_masked_sum_skips_padding():
    x = torch.tensor([[1.0, 2.0, NAN], [4.0, 1e6, -1e6]])
    mask = torch.tensor([[True, True, False], [True, False, False]])
    assert masked_sum(x, mask=mask) == 7.0


def test_the_sum_and_mean_of_nothing_are_zero_with_zero_gradient():
    x = torch.full((2, 3), NAN, requires_grad=True)
    mask = torch.zeros(2, 3, dtype=torch.bool)
    mean = divide_or_zero(masked_sum(x, mask=mask), mask.sum())
    mean.backward()
    assert mean == 0.0
    assert torch.equal(x.grad, torch.zeros(2, 3))


def test_bfloat16_is_summed_in_float32():
    x = torch.ones(1, 1000, dtype=torch.bfloat16)  # bfloat16 cannot count beyond 256
    total = masked_sum(x, mask=torch.ones(1, 1000, dtype=torch.bool))
    assert total.dtype == torch.float32
    assert total == 1000.0


def test_divide_or_zero():
    assert divide_or_zero(torch.tensor(3.0), torch.tensor(2)) == 1.5
    assert divide_or_zero(torch.tensor(3.0), torch.tensor(0)) == 0.0


@pytest.mark.parametrize("padding", [0.0, 1e6, NAN])
def test_whiten_by_hand(padding):
    # 1, 3, 5: mean 2 + 1, deviations -2, 0, 2, biased variance 8 / 3
    x = torch.tensor([[1.0, padding, 3.0], [5.0, padding, padding]])
    mask = torch.tensor([[True, False, True], [True, False, False]])
    z = 2 / math.sqrt(8 / 3)
    expected = torch.tensor([[-z, 0.0, 0.0], [z, 0.0, 0.0]])
    torch.testing.assert_close(whiten(x, mask=mask), expected)


@pytest.mark.parametrize("value", [0.0, 0.1, -3.3, 1e-30, 1e30])
@pytest.mark.parametrize("count", [0, 1, 2, 7])
def test_whiten_is_exactly_zero_where_all_tokens_are_equal(value, count):
    mask = torch.arange(7)[None] < count
    x = torch.where(mask, value, NAN)
    assert torch.equal(whiten(x, mask=mask), torch.zeros(1, 7))


def test_whiten_treats_rounding_noise_as_equal():
    x = torch.full((1, 64), 0.1)
    x[0, ::2] = torch.nextafter(x[0, ::2], torch.tensor(1.0))
    assert torch.equal(whiten(x, mask=torch.ones(1, 64, dtype=torch.bool)), torch.zeros(1, 64))


@pytest.mark.parametrize(("shift", "scale"), [(0.0, 1e-12), (0.0, 1e12), (1000.0, 0.1), (-5.0, 1e-3)])
def test_whiten_is_independent_of_unit_and_offset(shift, scale):
    x = torch.randn(8, 100, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    mask = torch.arange(100)[None] < torch.tensor([1, 3, 50, 100, 0, 7, 99, 2])[:, None]
    y = whiten((shift + scale * x).float(), mask=mask)
    valid = y[mask].double()
    assert y.dtype == torch.float32
    assert valid.mean().item() == pytest.approx(0, abs=1e-6)
    assert valid.var(correction=0).item() == pytest.approx(1, abs=1e-6)
    torch.testing.assert_close(y, whiten(x, mask=mask).float(), rtol=1e-3, atol=1e-3)


def test_variance_from_sums_of_two_micro_batches():
    # 1, 2, 6: mean 3, variance (4 + 1 + 9) / 3
    first = moment_sums(torch.tensor([[1.0, NAN]]), mask=torch.tensor([[True, False]]))
    second = moment_sums(torch.tensor([[2.0, 6.0]]), mask=torch.tensor([[True, True]]))
    total, square_total = (float(a + b) for a, b in zip(first, second, strict=True))
    assert (total, square_total) == (9.0, 41.0)
    assert variance_from_sums(count=3, total=total, square_total=square_total) == pytest.approx(14 / 3)


def test_explained_variance_by_hand():
    # returns 1, 2, 6 (variance 14/3); values 1, 1, 4: residuals 0, 1, 2 (mean 1, variance 2/3)
    assert explained_variance(
        count=3, returns=9.0, returns_square=41.0, residual=3.0, residual_square=5.0
    ) == pytest.approx(1 - (2 / 3) / (14 / 3))


@pytest.mark.parametrize(
    ("count", "returns", "returns_square", "residual", "residual_square", "expected"),
    [
        (0, 0.0, 0.0, 0.0, 0.0, 0.0),  # no tokens
        (3, 0.3, 0.03, 0.6, 0.5, 0.0),  # returns 0.1 three times: undefined
        (3, 9.0, 41.0, 3.0, 3.0, 1.0),  # off by a constant 1 everywhere
        (3, 9.0, 41.0, 9.0, 41.0, 0.0),  # values all zero
    ],
)
def test_explained_variance_limits(count, returns, returns_square, residual, residual_square, expected):
    result = explained_variance(
        count=count,
        returns=returns,
        returns_square=returns_square,
        residual=residual,
        residual_square=residual_square,
    )
    assert result == pytest.approx(expected)
