"""What a settings dataclass says of a field's values beside their type: numbers in an interval, one word out of a few.

    layers: Annotated[int, Limits(1, 1000)]
    dtype: Annotated[str, Words("bf16", "fp32")]

omegaconf takes ``Annotated[T, ...]`` for ``T``. A value of None is left to the setting's meaning.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Limits:
    """A number from ``smallest`` to ``largest``, both included; a whole one or ``or_word``, if there is such a word."""

    smallest: float
    largest: float
    or_word: str | None = None

    def check(self, name: str, value: Any) -> None:
        """Raise ValueError, which names the setting, unless ``value`` lies within."""
        if value is None or value == self.or_word:
            return
        interval = f"between {_text(self.smallest)} and {_text(self.largest)}"
        if self.or_word is not None and type(value) is not int:
            raise ValueError(f"{name}={value}: must be a whole number {interval}, or {self.or_word}")
        if not self.smallest <= value <= self.largest:
            raise ValueError(f"{name}={value}: must be {interval}")


class Words:
    """One of the ``allowed`` words."""

    def __init__(self, *allowed: str) -> None:
        self.allowed = allowed

    def check(self, name: str, value: Any) -> None:
        """Raise ValueError, which names the setting, unless ``value`` is one of them."""
        if value is not None and value not in self.allowed:
            raise ValueError(f"{name}={value}: must be one of {', '.join(self.allowed)}")


def _text(limit: float) -> str:
    return f"{limit:g}" if isinstance(limit, float) else str(limit)


def check_value(name: str, value: Any, said: Iterable[Any]) -> None:
    """Raise ValueError unless every number in ``value`` is finite and it keeps to what is ``said`` of the setting.

    Args:
        said: the annotations of its field, of which :class:`Limits` and :class:`Words` count.
    """
    for place, number in _fractions(value, name):
        if not math.isfinite(number):  # no comparison with a limit refuses both nan and inf
            raise ValueError(f"{place}={number}: must be a finite number")
    for rule in said:
        if isinstance(rule, Limits | Words):
            rule.check(name, value)


def _fractions(value: Any, name: str) -> Iterable[tuple[str, float]]:
    """(dotted name, value) of every fractional number in nested mappings and lists."""
    if isinstance(value, float):
        yield name, value
    parts = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, part in parts:
        yield from _fractions(part, f"{name}.{key}")
