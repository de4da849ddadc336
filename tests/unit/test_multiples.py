"""Rounding up and divisors."""

import pytest

from trainer.common.multiples import divide_up, divisors, round_up


def test_dividing_and_rounding_up():
    for unit in (1, 3, 8):
        for value in range(30):
            assert divide_up(value, unit) == min(n for n in range(31) if n * unit >= value)
            assert round_up(value, unit) == divide_up(value, unit) * unit


@pytest.mark.parametrize("number", [1, 2, 12, 16, 97, 360, 1000])
def test_divisors_come_in_order(number):
    assert list(divisors(number)) == [n for n in range(1, number + 1) if number % n == 0]


def test_divisors_of_large_numbers_are_found_at_once():
    assert divisors(10**12)[:4] == (1, 2, 4, 5)
    assert len(divisors(10**12)) == 13 * 13
