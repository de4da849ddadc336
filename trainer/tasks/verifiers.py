"""Verifiers, ``(response, example) -> reward in [0, 1]``: by name, or your own by dotted path.

Simplification: text only. What an answer *means* (algebra, code, units) is for a verifier of your own.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection
from decimal import Decimal
from typing import cast

from trainer.common.imports import import_named
from trainer.tasks.base import Example

Verifier = Callable[[str, Example], float]
# Digits with optional thousands commas and decimals; no exponents, so no response is expensive to compare.
_NUMBER = re.compile(r"[+-]?(?:[0-9][0-9,]*(?:\.[0-9]+)?|\.[0-9]+)")


def exact(response: str, example: Example) -> float:
    """1 if the response is the answer; runs of white space count as one blank, none at the ends."""
    return float(response.split() == example.answer.split())


def numeric(response: str, example: Example) -> float:
    """1 if the whole response is a number equal to the answer: ``+1,000.0`` is ``1000``."""
    number, expected = _NUMBER.fullmatch(response.strip()), _NUMBER.fullmatch(example.answer.strip())
    return float(number is not None and expected is not None and _value(number[0]) == _value(expected[0]))


def last_number(response: str, example: Example) -> float:
    """1 if the last number in the response equals the last in the answer (worked solutions, as in GSM8K)."""
    numbers, expected = _NUMBER.findall(response), _NUMBER.findall(example.answer)
    return float(bool(numbers) and bool(expected) and _value(numbers[-1]) == _value(expected[-1]))


def contains(response: str, example: Example) -> float:
    """1 if the answer occurs in the response as whole words, in any case. Pays for listing every answer."""
    answer = re.escape(example.answer.strip())
    return float(re.search(rf"(?<!\w){answer}(?!\w)", response, re.IGNORECASE) is not None)


VERIFIERS: dict[str, Verifier] = {
    "exact": exact,
    "numeric": numeric,
    "last_number": last_number,
    "contains": contains,
}


def resolve_verifier(name: str) -> Verifier:
    """The verifier called ``name``: a key of ``VERIFIERS`` or ``package.module.function``.

    Raises:
        ValueError: no such name, module or function; names ``task.verifier``.
    """
    if name in VERIFIERS:
        return VERIFIERS[name]
    return cast(Verifier, import_function(name, setting="task.verifier", names=VERIFIERS))


def import_function(name: str, *, setting: str, names: Collection[str] = ()) -> Callable[..., object]:
    """The function ``package.module.function`` that a setting names; ``names`` are what else it could have been.

    Raises:
        ValueError: no such module or function; names the setting.
    """
    if "." not in name:
        others = f"none of {list(names)} and no dotted path: use one of them or" if names else "no dotted path: use"
        raise ValueError(f"{setting}={name!r} is {others} {setting}=package.module.function")
    function = import_named(name, setting=setting)
    if not callable(function):
        raise ValueError(
            f"{setting}={name} is a {type(function).__name__}, must be a function (response, example) -> float"
        )
    return function


def verify(name: str, response: str, example: Example) -> float:
    """The reward under the verifier called ``name``. What a verifier of yours raises is passed on.

    Raises:
        ValueError: the verifier returned something outside [0, 1].
    """
    reward = float(resolve_verifier(name)(response, example))
    if not 0.0 <= reward <= 1.0:
        raise ValueError(f"task.verifier={name} returned {reward} for {response!r}; rewards lie in [0, 1]")
    return reward


def reward_of(name: str, response: str, example: Example) -> float:
    """What the reward function called ``name`` (``package.module.function``) pays: any finite number.

    Raises:
        ValueError: it returned something else. What it raises itself is passed on.
    """
    paid = import_function(name, setting="reward")(response, example)
    if not isinstance(paid, int | float) or not math.isfinite(paid):
        raise ValueError(f"reward={name} returned {paid!r} for {response!r}; rewards are finite numbers")
    return float(paid)


def _value(number: str) -> Decimal:
    return Decimal(number.replace(",", ""))
