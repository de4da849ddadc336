"""Verifiers, ``(response, example) -> reward in [0, 1]``: by name, or your own by dotted path.

Simplification: text only. What an answer *means* (algebra, code, units) is for a verifier of your own.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Collection
from decimal import Decimal
from typing import Any, cast

from trainer.common.imports import import_named
from trainer.tasks.base import Example, ResponseInfo

Verifier = Callable[[str, Example], float]
# Digits with optional thousands commas, decimals and exponent. Longer exponents are none: Decimal has limits.
_NUMBER = re.compile(r"[+-]?(?:[0-9][0-9,]*(?:\.[0-9]+)?|\.[0-9]+)(?:[eE][+-]?[0-9]{1,4}(?![0-9]))?")
_LARGEST_REWARD = 3.4028234663852886e38  # of a float32, in which rewards are added up


class RewardError(ValueError):
    """A response was paid something that is no reward."""


def exact(response: str, example: Example) -> float:
    """1 if the response is the answer; runs of white space count as one blank, none at the ends."""
    return float(response.split() == example.answer.split())


def numeric(response: str, example: Example) -> float:
    """1 if the whole response is a number equal to the answer: ``+1,000.0`` and ``1e3`` are ``1000``."""
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
        RewardError: the verifier returned something outside [0, 1].
    """
    reward = as_reward(resolve_verifier(name)(response, example), source=f"task.verifier={name}", response=response)
    if not 0.0 <= reward <= 1.0:
        raise RewardError(f"task.verifier={name} returned {reward} for {response!r}; rewards lie in [0, 1]")
    return reward


def reward_of(name: str, response: str, example: Example, info: ResponseInfo) -> float:
    """What the reward function called ``name`` (``package.module.function``) pays; one that takes a third argument gets
    ``info``. What it raises is passed on.

    Raises:
        RewardError: it returned no number, or none that is finite.
    """
    function = import_function(name, setting="reward")
    given = (response, example, info) if _takes_three(function) else (response, example)
    return as_reward(function(*given), source=f"reward={name}", response=response)


@functools.lru_cache(maxsize=8)
def _takes_three(function: Callable[..., object]) -> bool:
    """Whether a third argument can be given by place."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # a builtin without a signature
        return False
    by_place = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    return len([p for p in by_place if p.default is p.empty]) >= 3 or (
        len(by_place) >= 3 and by_place[2].name == "info"
    )


def as_reward(value: Any, *, source: str, response: str) -> float:
    """What ``source`` returned for ``response`` as a number: anything that ``float()`` takes and is finite in float32.

    Raises:
        RewardError: it is something else.
    """
    try:
        reward = float(value)
    except Exception as error:  # TypeError, ValueError, OverflowError; torch's is a RuntimeError
        raise RewardError(
            f"{source} returned {value!r} for {response!r}, which is no number: return one, such as 1.0"
        ) from error
    if not abs(reward) <= _LARGEST_REWARD:
        raise RewardError(f"{source} returned {value!r} for {response!r}: rewards are finite numbers (in float32)")
    return reward


def _value(number: str) -> Decimal:
    return Decimal(number.replace(",", ""))
