"""Sums and differences in digits and words: ``seven plus 5 =`` -> ``12``. A tiny model learns it.

Simplifications: answers are digits; the larger operand of a difference comes first, so no answer is negative;
operands end at 99, where the number words do (``task=chain_sum`` has longer numbers).
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property

from trainer.tasks.base import Example, Task, check_heldout_fraction, count_heldout
from trainer.tasks.verifiers import exact

SYMBOLS = {"plus": "+", "minus": "-"}
FORMS = ("digits", "words", "mixed")
LARGEST_OPERAND = 99
_BELOW_TWENTY = (
    "zero one two three four five six seven eight nine ten "
    "eleven twelve thirteen fourteen fifteen sixteen seventeen eighteen nineteen"
)
_TENS = "twenty thirty forty fifty sixty seventy eighty ninety"


def number_in_words(number: int) -> str:
    """English words of 0..99, with a hyphen from 21 on: ``forty-two``."""
    below_twenty = _BELOW_TWENTY.split()
    if number < 20:
        return below_twenty[number]
    tens, ones = divmod(number, 10)
    return _TENS.split()[tens - 2] + (f"-{below_twenty[ones]}" if ones else "")


@dataclass(frozen=True)
class Problem:
    """``left`` ``operation`` ``right``; a sum and its mirror are one problem, with ``left <= right``."""

    operation: str
    left: int
    right: int

    def examples(self, forms: str) -> Iterator[Example]:
        """Every wording, sums in both orders. ``mixed`` has those of both forms and two mixtures."""
        problem = f"{self.left} {self.operation} {self.right}"
        answer = str(self.left + self.right if self.operation == "plus" else self.left - self.right)
        orders = [(self.left, self.right)]
        if self.operation == "plus" and self.left != self.right:
            orders.append((self.right, self.left))
        for left, right in orders:
            metadata = {"operation": self.operation, "left": left, "right": right}
            words = (number_in_words(left), number_in_words(right))
            wordings = {
                "digits": [f"{left} {SYMBOLS[self.operation]} {right} ="],
                "words": [f"{words[0]} {self.operation} {words[1]} ="],
                "mixed": [f"{left} {self.operation} {words[1]} =", f"{words[0]} {self.operation} {right} ="],
            }
            for form in FORMS if forms == "mixed" else (forms,):
                for question in wordings[form]:
                    yield Example(question, answer, metadata, problem=problem)


@dataclass(frozen=True)
class ArithmeticTask(Task):
    """One- or two-digit arithmetic. Train and held-out share no problem, however worded, and no mirrored sum.

    Fields:
        max_operand: operands are 0..max_operand, at most 99.
        operations: some of ``plus``, ``minus``.
        forms: ``digits`` (``7 + 5 =``), ``words`` (``seven plus five =``) or ``mixed`` (these and
            ``seven plus 5 =``, ``7 plus five =``).
        heldout_fraction: share of each operation's problems that is held out.
        seed: chooses what is held out, and the order.
    """

    max_operand: int
    operations: list[str]
    forms: str
    heldout_fraction: float
    seed: int

    @cached_property
    def train(self) -> tuple[Example, ...]:
        return self._shuffled(self._split[0], purpose="train")

    @cached_property
    def heldout(self) -> tuple[Example, ...]:
        return self._shuffled(self._split[1], purpose="heldout")

    def score(self, response: str, example: Example) -> float:
        return exact(response, example)

    def validate(self) -> None:
        if not 1 <= self.max_operand <= LARGEST_OPERAND:
            raise ValueError(
                f"task.max_operand={self.max_operand} must lie in 1..{LARGEST_OPERAND}: try "
                "task.max_operand=9 or task=chain_sum for longer numbers"
            )
        if not self.operations or len(set(self.operations)) < len(self.operations):
            raise ValueError(
                f"task.operations={self.operations} must name one or two operations: task.operations=[plus]"
            )
        for operation in self.operations:
            if operation not in SYMBOLS:
                raise ValueError(
                    f"task.operations has {operation!r}, allowed are {list(SYMBOLS)}: task.operations=[plus]"
                )
        if self.forms not in FORMS:
            raise ValueError(f"task.forms={self.forms!r} is none of {list(FORMS)}: try task.forms=mixed")
        check_heldout_fraction(self.heldout_fraction)

    @cached_property
    def _split(self) -> tuple[list[Problem], list[Problem]]:
        train: list[Problem] = []
        heldout: list[Problem] = []
        for operation in sorted(self.operations):
            problems = []
            for small in range(self.max_operand + 1):
                for large in range(small, self.max_operand + 1):
                    left, right = (small, large) if operation == "plus" else (large, small)
                    problems.append(Problem(operation, left, right))
            random.Random(f"{self.seed}/{operation}/split").shuffle(problems)
            count = count_heldout(len(problems), fraction=self.heldout_fraction)
            heldout += problems[:count]
            train += problems[count:]
        return train, heldout

    def _shuffled(self, problems: Iterable[Problem], *, purpose: str) -> tuple[Example, ...]:
        examples = [example for problem in problems for example in problem.examples(self.forms)]
        random.Random(f"{self.seed}/{purpose}/order").shuffle(examples)
        return tuple(examples)
