"""Guess the number: ``1 to 30:`` -> ``16`` -> ``higher`` -> ``24`` -> ``lower`` -> ``20`` ... until it is found.

The game is of the kind of reasoning-gym's (https://github.com/open-thought/reasoning-gym), with more than one turn.
What the warm-up shows is a careless player, who guesses any number that is still possible; halving is left to be found.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated

from trainer.common.limits import Limits
from trainer.tasks.base import Environment, Example, Reply, check_heldout_fraction, count_heldout

HIGHER, LOWER, NO_GUESS = " higher", " lower", " ?"
_GUESS = re.compile(r"[0-9]{1,4}")


@dataclass(frozen=True)
class GuessNumber(Environment):
    """Games in which a number from 1 to n is to be found. A game is a range and the number; no held-out one is trained
    on.

    Fields:
        smallest_range, largest_range: n is from the first to the second.
        heldout_fraction: share of all games that is held out.
        max_turns: guesses; what is no number in the range is one too.
        seed: chooses what is held out, the order, and the guesses that the warm-up shows.
    """

    smallest_range: Annotated[int, Limits(2, 300)]
    largest_range: Annotated[int, Limits(2, 300)]
    heldout_fraction: Annotated[float, Limits(0, 1)]
    max_turns: Annotated[int, Limits(1, 1000)]
    seed: int

    @cached_property
    def train(self) -> tuple[Example, ...]:
        return self._games[count_heldout(len(self._games), fraction=self.heldout_fraction) :]

    @cached_property
    def heldout(self) -> tuple[Example, ...]:
        return self._games[: count_heldout(len(self._games), fraction=self.heldout_fraction)]

    def answer(self, responses: Sequence[str], example: Example) -> Reply:
        guess, number = responses[-1].strip(), int(example.answer)
        if not _GUESS.fullmatch(guess):
            return Reply(0.0, NO_GUESS)
        if int(guess) == number:
            return Reply(1.0)
        return Reply(0.0, HIGHER if number > int(guess) else LOWER)

    def demonstration(self, example: Example) -> list[str]:
        draw = random.Random(f"{self.seed}/{example.problem}/guesses")
        low, high, guesses, number = 1, example.metadata["range"], list[int](), int(example.answer)
        while len(guesses) < self.max_turns and guesses[-1:] != [number]:
            guesses.append(draw.randint(low, high))
            low, high = (guesses[-1] + 1, high) if number > guesses[-1] else (low, guesses[-1] - 1)
        return [str(guess) for guess in guesses]

    def corpus(self) -> Iterator[str]:
        for text in super().corpus():
            yield from (text, HIGHER, LOWER)

    def validate(self) -> None:
        check_heldout_fraction(self.heldout_fraction)
        if self.smallest_range > self.largest_range:
            raise ValueError(
                f"task.smallest_range={self.smallest_range} is more than task.largest_range={self.largest_range}: use "
                f"task.largest_range={self.smallest_range} or more"
            )

    @cached_property
    def _games(self) -> tuple[Example, ...]:
        games = [
            Example(f"1 to {size}:", str(number), {"range": size}, problem=f"{number} of {size}")
            for size in range(self.smallest_range, self.largest_range + 1)
            for number in range(1, size + 1)
        ]
        random.Random(f"{self.seed}/games").shuffle(games)
        return tuple(games)
