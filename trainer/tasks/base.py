"""The contract between an environment and the loop: examples to ask, answers to responses, a tokenizer's corpus.

An episode is a question, a response, the environment's answer to it, a response, and so on, until the environment ends
it. A :class:`Task` is the case of one turn. None of them sees tokens, only text.
"""

from __future__ import annotations

import dataclasses
import itertools
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from trainer.tasks.tools import ToolResult

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


@dataclass(frozen=True)
class Reply:
    """What an environment answers to a response: what it pays for it, and the ``text`` with which the episode goes on,
    None where it ends. ``calls``: what the tools said that it has called."""

    reward: float
    text: str | None = None
    calls: tuple[ToolResult, ...] = ()


class Environment(ABC):
    """Base of the environments: frozen dataclasses, fields are exactly the keys of their YAML, no defaults in Python.

    Everything is a function of the fields (``seed`` is one), so every rank that builds the same environment holds
    the same examples in the same order. What is derived is cached on the instance; pickle leaves it behind.

    Attributes:
        max_turns: responses of an episode at most, a field of the dataclass.
    """

    max_turns: int

    @property
    @abstractmethod
    def train(self) -> Sequence[Example]:
        """Questions to train on; may be lazy and may repeat."""

    @property
    @abstractmethod
    def heldout(self) -> Sequence[Example]:
        """Questions to evaluate on; none of them is in ``train``."""

    @abstractmethod
    def answer(self, responses: Sequence[str], example: Example) -> Reply:
        """The reply to the last of ``responses``, which are all of an episode so far, any text. There is no other
        state: what happened before is to be read from them. An episode that solves its problem is paid 1 in all, junk
        0."""

    @abstractmethod
    def validate(self) -> None:
        """Quick check of the fields, made before anything is launched.

        Raises:
            ValueError: a field is wrong; names the override to change.
        """

    def demonstration(self, example: Example) -> Sequence[str]:
        """The responses of an episode that the supervised warm-up shows; here the answer alone."""
        return (example.answer,)

    def corpus(self) -> Iterator[str]:
        """Text to train a tokenizer on: the first training questions and their responses, nothing held out."""
        for example in itertools.islice(self.train, CORPUS_EXAMPLES):
            yield example.question
            yield from self.demonstration(example)

    def __getstate__(self) -> dict[str, Any]:
        assert dataclasses.is_dataclass(self)
        return {entry.name: getattr(self, entry.name) for entry in dataclasses.fields(self)}


class Task(Environment):
    """Base of the tasks: environments of one turn, which a score ends."""

    max_turns = 1

    @abstractmethod
    def score(self, response: str, example: Example) -> float:
        """The reward of any text as a response to ``example``, in [0, 1]; 1 is a right answer. Junk is 0."""

    def answer(self, responses: Sequence[str], example: Example) -> Reply:
        return Reply(self.score(responses[-1], example))


def check_heldout_fraction(fraction: float) -> None:
    """Raise ``ValueError`` unless a part of the questions is held out and a part is not."""
    if not 0.0 < fraction < 1.0:
        raise ValueError(f"task.heldout_fraction={fraction} must lie between 0 and 1: try task.heldout_fraction=0.1")


def count_heldout(count: int, *, fraction: float) -> int:
    """How many of ``count`` >= 2 questions are held out: the fraction, but neither none nor all."""
    return min(max(round(count * fraction), 1), count - 1)
