"""Sums and differences of long numbers, with a calculator: ``482 + 977 =`` -> ``482+977`` -> ``1459`` -> ``1459``.

A response with an operator in it is a call, to which the calculator's answer is the environment's; any other is the
answer to the question. Most of what the warm-up shows is answers by heart, which do not generalise; that calling pays
is left to be found.
"""

from __future__ import annotations

import ast
import operator
import random
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated

from trainer.common.limits import Limits
from trainer.tasks.arithmetic import SYMBOLS
from trainer.tasks.base import Environment, Example, Reply, check_heldout_fraction, count_heldout
from trainer.tasks.tools import Tool
from trainer.tasks.verifiers import exact

_LONGEST = 200  # characters of an expression
_BINARY: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
}
_UNARY: dict[type[ast.unaryop], Callable[[int], int]] = {ast.UAdd: operator.pos, ast.USub: operator.neg}


def calculate(expression: str) -> int:
    """The value of whole numbers with ``+ - *`` and brackets; nothing else is looked at, and nothing is evaluated.

    Raises:
        ValueError: it is something else, or longer than 200 characters.
    """
    if len(expression) > _LONGEST:
        raise ValueError(f"more than {_LONGEST} characters")
    try:
        return _value(ast.parse(expression.strip(), mode="eval").body)
    except (SyntaxError, MemoryError, RecursionError) as error:
        raise ValueError("no sum") from error


def _value(node: ast.expr) -> int:
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    if isinstance(node, ast.BinOp) and type(node.op) in _BINARY:
        return _BINARY[type(node.op)](_value(node.left), _value(node.right))
    if isinstance(node, ast.UnaryOp) and type(node.op) in _UNARY:
        return _UNARY[type(node.op)](_value(node.operand))
    raise ValueError("no sum")


@dataclass(frozen=True)
class Calculator(Environment):
    """Two-term sums and differences, and a calculator to call. Train and held-out share no pair of numbers.

    Fields:
        digits: of each of the two numbers.
        operations: some of ``plus``, ``minus``; the larger number of a difference comes first.
        examples: different questions, of which the fraction is held out.
        heldout_fraction: of them.
        call_share: of the questions that the warm-up shows, those with a call; the others have the answer alone.
        max_turns: responses of an episode; 2 are a call and the answer.
        tool_seconds: time limit of a call.
        seed: draws the numbers.
    """

    digits: Annotated[int, Limits(1, 30)]
    operations: list[str]
    examples: Annotated[int, Limits(2, 100_000)]
    heldout_fraction: Annotated[float, Limits(0, 1)]
    call_share: Annotated[float, Limits(0, 1)]
    max_turns: Annotated[int, Limits(1, 1000)]
    tool_seconds: Annotated[float, Limits(1e-3, 1e6)]
    seed: int

    @cached_property
    def train(self) -> tuple[Example, ...]:
        return self._all[self._heldout_count :]

    @cached_property
    def heldout(self) -> tuple[Example, ...]:
        return self._all[: self._heldout_count]

    def answer(self, responses: Sequence[str], example: Example) -> Reply:
        if not re.search(r"[-+*]", responses[-1]):
            return Reply(exact(responses[-1], example))
        result = self._tool(responses[-1])
        return Reply(0.0, f" {result.text} =" if result.is_ok else " ? =", (result,))

    def demonstration(self, example: Example) -> list[str]:
        calls = random.Random(f"{self.seed}/{example.question}/call").random() < self.call_share
        return [*[example.question.removesuffix(" =").replace(" ", "")] * calls, example.answer]

    def validate(self) -> None:
        check_heldout_fraction(self.heldout_fraction)
        if not self.operations or not set(self.operations) <= SYMBOLS.keys():
            raise ValueError(f"task.operations={self.operations} must name some of {list(SYMBOLS)}: [plus,minus]")
        most = len(set(self.operations)) * self._numbers * (self._numbers + 1) // 2
        if self.examples > most // 2:
            raise ValueError(
                f"task.examples={self.examples} with task.digits={self.digits}: there are {most} different questions; "
                f"use task.examples={most // 2} or fewer, or more digits"
            )

    @cached_property
    def _tool(self) -> Tool:
        return Tool("calculator", calculate, seconds=self.tool_seconds)

    @property
    def _heldout_count(self) -> int:
        return count_heldout(self.examples, fraction=self.heldout_fraction)

    @property
    def _numbers(self) -> int:
        """How many have so many digits."""
        return 9 * 10 ** (self.digits - 1)

    @cached_property
    def _all(self) -> tuple[Example, ...]:
        found: dict[str, Example] = {}
        for example in self._drawn():
            found.setdefault(example.problem, example)
            if len(found) == self.examples:
                break
        return tuple(found.values())

    def _drawn(self) -> Iterator[Example]:
        draw, smallest = random.Random(f"{self.seed}/calculator"), 10 ** (self.digits - 1)
        while True:
            operation = draw.choice(sorted(self.operations))
            numbers = [smallest + draw.randrange(self._numbers) for _ in range(2)]
            low, high = sorted(numbers)
            left, right = numbers if operation == "plus" else (high, low)
            question = f"{left} {SYMBOLS[operation]} {right}"
            yield Example(f"{question} =", str(calculate(question)), problem=f"{low} {operation} {high}")
