"""Which questions a run may ask: all prompts and answers are measured before anything is launched.

Of a file, or whatever else a task holds as a tuple or list, every question is measured; of questions that a task makes
as they are asked for, those that the run will draw. ``data.too_long`` says what becomes of a prompt of more than
``rollout.max_prompt_tokens`` tokens and of a warm-up's answer of more than ``rollout.max_new_tokens`` with its end: an
error, or the question is left out (the next one stands in for it), or what is too long is shortened. Where the warm-up
shows several turns, all that stands before a response is held to the first limit.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from rich.console import Console
from rich.progress import track

from trainer.common.seeds import seed_for
from trainer.config.schema import AlgoConfig, Config
from trainer.data.demonstrations import told, turns
from trainer.data.encoding import Encoder
from trainer.tasks.base import Environment, Example

_SAMPLE = 16  # of questions that are made as they are asked for
_BATCH = 256  # questions that are encoded together
_SHOWN_FROM = 2000  # questions that a task holds; fewer take no time


@dataclass(frozen=True)
class Selection:
    """What the parent tells the workers about the examples that it has measured.

    Attributes:
        digest: :func:`digest_of` the task.
        dropped, dropped_heldout: positions in ``task.train`` and ``task.heldout`` that are left out.
        summary: for the report: how many there are, and what became of those that are too long.
    """

    digest: str
    dropped: frozenset[int]
    dropped_heldout: frozenset[int]
    summary: str


def drawn_positions(config: Config, purpose: str, step: int, *, count: int, population: int) -> list[int]:
    """The training questions that all ranks together draw for a step (from 1): a function of (seed, purpose, step).

    Without ``data.replacement`` steps go through all questions in a shuffled order, then through all of them in another
    one. (Where a question is left out as too long, its stand-in is asked twice.)
    """
    if config.data.replacement:
        generator = torch.Generator().manual_seed(seed_for(config.seed, purpose, step=step))
        return torch.randint(population, (count,), generator=generator).tolist()
    numbers = range((step - 1) * count, step * count)
    return [_epoch(config.seed, purpose, number // population, population)[number % population] for number in numbers]


@functools.lru_cache(maxsize=4)
def _epoch(seed: int, purpose: str, epoch: int, population: int) -> list[int]:
    """The order of all questions in one pass over them."""
    generator = torch.Generator().manual_seed(seed_for(seed, f"{purpose}/epoch", step=epoch))
    return torch.randperm(population, generator=generator).tolist()


def purpose_of_round(number: int) -> str:
    """What the questions of a round are drawn for: of the first one, or of dynamic sampling after it."""
    return "prompts" if number == 0 else f"prompts/round_{number}"


def demonstrated(algo: AlgoConfig, count: int) -> int:
    """Of ``count`` training questions: how many, from the first on, the warm-up may show the answers of."""
    return count if algo.warmup_questions is None else min(algo.warmup_questions, count)


def stand_in(position: int, *, dropped: Collection[int], population: int) -> int:
    """The question itself or, where it is left out, the next one that is not."""
    return next(i % population for i in itertools.count(position) if i % population not in dropped)


def digest_of(task: Environment) -> str:
    """SHA-256 (hex) of the task's questions and answers; of those made as they are asked for, a sample of train."""
    train = task.train if _holds(task.train) else task.train[:_SAMPLE]
    digest = hashlib.sha256()
    for example in itertools.chain(task.heldout, train):
        digest.update(f"{len(example.question)} {example.question}{len(example.answer)} {example.answer}".encode())
    return digest.hexdigest()


def select(config: Config, task: Environment, *, encoder: Encoder, console: Console) -> Selection:
    """Measure the examples that the run can meet.

    Raises:
        ValueError: something is too long under ``data.too_long=error`` (the first is named, with its file and line), a
            prompt is empty, or nothing is left.
    """
    measure = _Measure(config, task, encoder, console)
    train, drawn = task.train, _drawn(config, task.train)
    long_train, measured = _with_stand_ins(config, measure, train, drawn)
    long_heldout = measure.too_long(task.heldout, range(len(task.heldout)), of="held-out question")
    long = [*long_train, *long_heldout]
    counts = f"{len(train)} training and {len(task.heldout)} held-out questions"
    if len(measured) < len(train):
        counts += f", of which the {len(measured)} that the run can draw were measured"
    if not long:
        return Selection(digest_of(task), frozenset(), frozenset(), counts)
    if config.data.too_long == "error":
        raise ValueError(_complaint(long, counts))
    trains, heldouts = ({one.position for one in found} for found in (long_train, long_heldout))
    longest = f"{len(trains)} and {len(heldouts)} of them too long (up to {max(one.tokens for one in long)} tokens)"
    if config.data.too_long == "truncate":
        for one in long:
            encoder.shortened(one.example.question, most=config.rollout.max_prompt_tokens)
        return Selection(digest_of(task), frozenset(), frozenset(), f"{counts}; {longest}, shortened")
    if len(heldouts) == len(task.heldout):
        raise ValueError(f"data.too_long=drop leaves no held-out question: {long_heldout[0].complaint}")
    return Selection(digest_of(task), frozenset(trains), frozenset(heldouts), f"{counts}; {longest}, left out")


@dataclass(frozen=True)
class _TooLong:
    """A prompt or an answer of more tokens than ``setting`` allows."""

    position: int
    example: Example
    tokens: int
    setting: str
    complaint: str


def _holds(examples: Sequence[Example]) -> bool:
    """Whether they are there, and not made as they are asked for."""
    return isinstance(examples, tuple | list)


def _drawn(config: Config, train: Sequence[Example]) -> Collection[int]:
    """The positions in ``train`` that the run can draw: of questions that are held all, since a longer run draws more
    of them."""
    count, algo = len(train), config.algo
    if _holds(train):
        return range(count)
    rounds = [purpose_of_round(number) for number in range(1 + algo.dynamic_sampling_rounds)]
    sizes = {"warm_up": algo.warmup_batch_size, **dict.fromkeys(rounds, algo.prompts_per_step)}
    populations = {"warm_up": demonstrated(algo, count), **dict.fromkeys(rounds, count)}
    steps = {"warm_up": algo.warmup_steps, **dict.fromkeys(rounds, algo.num_steps)}
    draws = [(purpose, step) for purpose, last in steps.items() for step in range(1, last + 1)]
    return {
        position
        for purpose, step in draws
        for position in drawn_positions(config, purpose, step, count=sizes[purpose], population=populations[purpose])
    }


def _with_stand_ins(
    config: Config, measure: _Measure, train: Sequence[Example], drawn: Collection[int]
) -> tuple[list[_TooLong], set[int]]:
    """What is too long of the questions drawn and, where those are left out, of their stand-ins; all that was
    measured."""
    found: list[_TooLong] = []
    measured: set[int] = set()
    todo = drawn
    while todo:
        found += measure.too_long(train, sorted(todo), of="training question", answers=config.algo.warmup_steps > 0)
        measured.update(todo)
        dropped = {one.position for one in found} if config.data.too_long == "drop" else set()
        if len(dropped) == len(train):
            raise ValueError(f"data.too_long=drop leaves no training question: {found[0].complaint}")
        todo = {stand_in(i, dropped=dropped, population=len(train)) for i in drawn if i in dropped} - measured
    return found, measured


@dataclass(frozen=True)
class _Measure:
    config: Config
    environment: Environment
    encoder: Encoder
    console: Console

    def too_long(
        self, examples: Sequence[Example], positions: Sequence[int], *, of: str, answers: bool = False
    ) -> list[_TooLong]:
        """What is too long at these positions, in their order, under a progress bar where that takes long.

        Raises:
            ValueError: a prompt is empty.
        """
        is_held = _holds(examples)
        shown = self.console.is_terminal and len(positions) > (_SHOWN_FROM if is_held else _SAMPLE)
        size = _BATCH if is_held else _SAMPLE
        starts = track(
            range(0, len(positions), size),
            f"measuring each {of}",
            console=self.console,
            transient=True,
            disable=not shown,
        )
        return [
            one for start in starts for one in self._of_batch(examples, positions[start : start + size], of, answers)
        ]

    def _of_batch(
        self, examples: Sequence[Example], positions: Sequence[int], of: str, answers: bool
    ) -> Iterator[_TooLong]:
        rollout = self.config.rollout
        batch = [examples[position] for position in positions]
        prompts = self.encoder.questions(example.question for example in batch)
        shown: Any = [[(prompt, [])] for prompt in prompts]
        if answers:
            shown = turns(prompts, [told(self.environment, example) for example in batch], self.encoder)
        for position, example, demonstration in zip(positions, batch, shown, strict=True):
            where, before, length = example.origin or f"{of} {position}", "the prompt", 0
            if not demonstration[0][0]:
                raise ValueError(f"{where}: the prompt has no tokens: a question needs some text")
            for given, answer in demonstration:
                length += len(given)
                for text, tokens, setting, most in (
                    (before, length, "rollout.max_prompt_tokens", rollout.max_prompt_tokens),
                    ("the answer with its end", len(answer), "rollout.max_new_tokens", rollout.max_new_tokens),
                ):
                    if tokens > most:
                        complaint = f"{where}: {text} has {tokens} tokens, more than {setting}={most}"
                        yield _TooLong(position, example, tokens, setting, complaint)
                before, length = "what was said before a later turn", length + len(answer)


def _complaint(long: Sequence[_TooLong], counts: str) -> str:
    """The first one, how many there are, and what lets them pass."""
    needed: dict[str, int] = {}
    for one in long:
        needed[one.setting] = max(one.tokens, needed.get(one.setting, 0))
    settings = " ".join(f"{setting}={tokens}" for setting, tokens in needed.items())
    return (
        f"{long[0].complaint}. Of {counts}, {len(long)} texts are too long: use {settings}, or leave such questions "
        "out (data.too_long=drop), or shorten them (data.too_long=truncate)"
    )
