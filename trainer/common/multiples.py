"""Multiples and divisors, and the multiples that several folders must agree on."""

from __future__ import annotations

import math
from functools import cache

ALIGNMENT_BYTES = 64  # of tensors in one buffer: other offsets change the summation order, and so the bits, on CPU
LENGTH_MULTIPLE = 8  # columns of a batch are a multiple of it: fewer shapes for kernels and allocators


def divide_up(value: int, unit: int) -> int:
    """How many ``unit`` it takes to hold ``value``."""
    return -(-value // unit)


def round_up(value: int, unit: int) -> int:
    """The smallest multiple of ``unit`` that is not below ``value``."""
    return divide_up(value, unit) * unit


@cache
def divisors(number: int) -> tuple[int, ...]:
    """All divisors of a positive number, the smallest first."""
    small = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    large = [number // n for n in reversed(small) if n * n != number]
    return (*small, *large)
