"""Any dataset of reasoning-gym (https://github.com/open-thought/reasoning-gym), generated as it is asked for.

Its scorers need care. Some raise on junk: that is 0 here. The default one pays a part for merely containing
the answer: scores under ``threshold`` are 0. Some read the answer out of longer text: ``verifier=exact`` does
not. A few pay junk in full: ``validate`` tries some junk and refuses such a dataset. Five give no answer that
a model could warm up on (boxnet, graph_color, propositional_logic, rubiks_cube, rush_hour): refused too.

Simplification: no time limit on a scorer.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Annotated, Any

from trainer.common.limits import Limits
from trainer.tasks.base import Example, Task
from trainer.tasks.verifiers import VERIFIERS, resolve_verifier, verify

if TYPE_CHECKING:
    from reasoning_gym.dataset import ProceduralDataset

OWN_SCORER = "dataset"
_RESERVED_ARGUMENTS = ("seed", "size")
_HELDOUT_DRAWS = 4  # per held-out example, to find different questions
_PATIENCE = 1000  # draws without a new question, after which there is none: of n questions one in e^10 is missed
_PROBES = 8
_JUNK = ("", "junk", "nan")


class _Without(Sequence[Example]):
    """The examples of ``dataset``, lazily; the next one not in ``excluded`` stands in for one that is."""

    def __init__(self, dataset: ProceduralDataset, *, excluded: frozenset[str]) -> None:
        self.dataset, self.excluded = dataset, excluded

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return tuple(self[position] for position in range(len(self))[index])
        first = range(len(self))[index]
        for position in (*range(first, len(self)), *range(first)):
            item = _item(self.dataset, position)
            if item["question"] not in self.excluded:
                return _example(item)
        raise ValueError(
            f"every question is held out: use less than task.heldout_size={len(self.excluded)}, "
            "or task.arguments that allow more questions"
        )


@dataclass(frozen=True)
class ReasoningGymTask(Task):
    """A reasoning-gym dataset. Held-out has its own seed, no question twice, and none that ``train`` has.

    Fields:
        dataset: its name, as in ``reasoning_gym.factory.DATASETS``.
        arguments: keyword arguments of its configuration, except ``seed`` and ``size``.
        train_size, heldout_size: numbers of examples.
        verifier: ``dataset`` for the dataset's own scorer, or as for ``JsonlTask``.
        threshold: a score under it is 0, others are paid as they are; 1 pays right answers only.
        seed: chooses the questions.
    """

    dataset: str
    arguments: dict[str, Any]
    train_size: Annotated[int, Limits(1, 1_000_000_000)]
    heldout_size: Annotated[int, Limits(1, 100_000)]
    verifier: str
    threshold: Annotated[float, Limits(0, 1)]
    seed: int

    @cached_property
    def train(self) -> Sequence[Example]:
        excluded = frozenset(example.question for example in self.heldout)
        return _Without(self._datasets["train"], excluded=excluded)

    @cached_property
    def heldout(self) -> tuple[Example, ...]:
        examples: dict[str, Example] = {}
        drawn, newest = self._datasets["heldout"], 0
        for index in range(len(drawn)):
            example = _example(_item(drawn, index))
            newest = newest if example.question in examples else index
            examples.setdefault(example.question, example)
            if len(examples) == self.heldout_size:
                return tuple(examples.values())
            if index - newest > max(_PATIENCE, 10 * len(examples)):
                break
        raise ValueError(
            f"{self.dataset} with task.arguments={self.arguments} has about {len(examples)} different "
            f"questions, too few for task.heldout_size={self.heldout_size}: "
            f"use task.heldout_size={max(len(examples) // 5, 1)}"
        )

    def score(self, response: str, example: Example) -> float:
        if self.verifier != OWN_SCORER:
            reward = verify(self.verifier, response, example)
        else:
            entry = {"question": example.question, "answer": example.answer, "metadata": example.metadata}
            try:
                reward = min(float(self._datasets["train"].score_answer(response.strip(), entry)), 1.0)
            except Exception:  # third-party parsers raise anything on junk
                return 0.0
        return reward if reward >= self.threshold else 0.0

    def validate(self) -> None:
        for key in ("train_size", "heldout_size"):
            if getattr(self, key) < 1:
                raise ValueError(f"task.{key}={getattr(self, key)} must be at least 1: try task.{key}=64")
        if not 0.0 < self.threshold <= 1.0:
            raise ValueError(f"task.threshold={self.threshold} must lie in (0, 1]: try task.threshold=1.0")
        if self.verifier != OWN_SCORER:
            try:
                resolve_verifier(self.verifier)
            except ValueError as error:
                raise ValueError(f"{error} (or task.verifier={OWN_SCORER})") from error
        for index in range(min(_PROBES, self.train_size)):
            self._check_scorer(_example(_item(self._datasets["train"], index)))

    def _check_scorer(self, example: Example) -> None:
        if self.verifier != OWN_SCORER and self.verifier not in VERIFIERS:
            return
        if self.score(example.answer, example) == 0.0:
            raise ValueError(
                f"task.verifier={self.verifier} pays 0 for {self.dataset}'s own answer {example.answer!r}: "
                "use task.verifier=exact or another task.dataset"
            )
        for junk in _JUNK:
            if junk != example.answer and self.score(junk, example) > 0.0:
                raise ValueError(
                    f"task.verifier={self.verifier} pays {self.score(junk, example):g} for {junk!r} in "
                    f"{self.dataset}: use task.verifier=exact or a higher task.threshold"
                )

    @cached_property
    def _datasets(self) -> Mapping[str, ProceduralDataset]:
        try:
            import reasoning_gym
            from reasoning_gym.factory import DATASETS
        except ImportError as error:
            raise ImportError(
                f"task.dataset={self.dataset} needs reasoning-gym: pip install 'torpor[tasks]'"
            ) from error
        if self.dataset not in DATASETS:
            raise ValueError(f"task.dataset={self.dataset!r} is no reasoning-gym dataset; it has {sorted(DATASETS)}")
        for name in _RESERVED_ARGUMENTS:
            if name in self.arguments:
                raise ValueError(f"task.arguments has {name!r}: use seed=... and task.train_size=... instead")
        datasets = {}
        for purpose, size in (("train", self.train_size), ("heldout", self.heldout_size * _HELDOUT_DRAWS)):
            # Item i is often drawn with seed + i, so neighbouring seeds would give the same questions.
            seed = random.Random(f"{self.seed}/{purpose}").randrange(2**31)
            try:
                datasets[purpose] = reasoning_gym.create_dataset(self.dataset, size=size, seed=seed, **self.arguments)
            except (TypeError, AssertionError, ValueError) as error:
                raise ValueError(
                    f"{self.dataset} refuses task.arguments={self.arguments} with "
                    f"task.train_size={self.train_size}, task.heldout_size={self.heldout_size}: {error}"
                ) from error
        return datasets


def _item(dataset: ProceduralDataset, position: int) -> dict[str, Any]:
    """A function of seed and position alone, also where the dataset (list_functions) draws from the generator that all
    of Python shares."""
    before = random.getstate()
    random.seed(f"{dataset.seed}/{position}")
    try:
        return dataset[position]
    finally:
        random.setstate(before)


def _example(item: Mapping[str, Any]) -> Example:
    if not isinstance(item["answer"], str):
        name = item["metadata"]["source_dataset"]
        raise ValueError(f"reasoning-gym's {name} gives no answers, only a scorer: choose another task.dataset=...")
    return Example(item["question"], item["answer"], item["metadata"])
