"""The contract between a task and the loop: examples to ask, a verifier to pay, text to train a tokenizer on.

Simplification: one turn. A task never sees tokens, only text, and a response is judged by itself.
"""

from __future__ import annotations

import dataclasses
import itertools
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

CORPUS_EXAMPLES = 2048


@dataclass(frozen=True)
class Example:
    """One question. ``metadata`` is whatever the task's verifier needs besides ``answer``; ``origin`` says where it
    stands (``questions.jsonl, line 7``), for messages about it; ``problem`` is the same for all wordings of
    one problem, which are not independent when accuracy is measured (empty: the question is a problem of its own)."""

    question: str
    answer: str
    metadata: Mapping[str, Any] = field(default_factory=dict)
    origin: str = field(default="", compare=False)
    problem: str = field(default="", compare=False)

    def __post_init__(self) -> None:
        """Raises ValueError unless question and answer are text that can be encoded."""
        for name in ("question", "answer"):
            value = getattr(self, name)
            where = self.origin or f"an example with question={self.question!r}"
            if not isinstance(value, str):
                raise ValueError(f"{where}: its {name} is {value!r}, a {type(value).__name__}, must be text")
            try:
                value.encode()
            except UnicodeEncodeError as error:
                raise ValueError(
                    f"{where}: its {name} holds {value[error.start]!r}, half of a character (a lone surrogate), which "
                    "is no text: write the whole character"
                ) from error


@dataclass(frozen=True)
class ResponseInfo:
    """What a reward function may know of a response besides its text: its tokens, the one that ended it included, and
    whether it was cut off at ``rollout.max_new_tokens``."""

    token_count: int
    truncated: bool


class Task(ABC):
    """Base of the task dataclasses: frozen, fields are exactly the keys of their YAML, no defaults in Python.

    Everything is a function of the fields (``seed`` is one), so every rank that builds the same task holds
    the same examples in the same order. What is derived is cached on the instance; pickle leaves it behind.
    """

    @property
    @abstractmethod
    def train(self) -> Sequence[Example]:
        """Questions to train on; may be lazy and may repeat."""

    @property
    @abstractmethod
    def heldout(self) -> Sequence[Example]:
        """Questions to evaluate on; none of them is in ``train``."""

    @abstractmethod
    def score(self, response: str, example: Example) -> float:
        """The reward of any text as a response to ``example``, in [0, 1]; 1 is a right answer. Junk is 0."""

    @abstractmethod
    def validate(self) -> None:
        """Quick check of the fields, made before anything is launched.

        Raises:
            ValueError: a field is wrong; names the override to change.
        """

    def corpus(self) -> Iterator[str]:
        """Text to train a tokenizer on: the first training questions and answers, nothing held out."""
        for example in itertools.islice(self.train, CORPUS_EXAMPLES):
            yield example.question
            yield example.answer

    def __getstate__(self) -> dict[str, Any]:
        assert dataclasses.is_dataclass(self)
        return {entry.name: getattr(self, entry.name) for entry in dataclasses.fields(self)}


def check_heldout_fraction(fraction: float) -> None:
    """Raise ``ValueError`` unless a part of the questions is held out and a part is not."""
    if not 0.0 < fraction < 1.0:
        raise ValueError(f"task.heldout_fraction={fraction} must lie between 0 and 1: try task.heldout_fraction=0.1")


def count_heldout(count: int, *, fraction: float) -> int:
    """How many of ``count`` >= 2 questions are held out: the fraction, but neither none nor all."""
    return min(max(round(count * fraction), 1), count - 1)
