"""Tasks that are no function of their fields, importable by name in workers."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from dataclasses import dataclass

from trainer.tasks import Example
from trainer.tasks.arithmetic import ArithmeticTask


@dataclass(frozen=True)
class RankDependent(ArithmeticTask):
    """Its last training question is another one on every rank, and in the launching process."""

    @property
    def train(self) -> Sequence[Example]:
        *others, last = ArithmeticTask(**dataclasses.asdict(self)).train
        return [*others, dataclasses.replace(last, question=f"{last.question} {os.environ.get('RANK')}")]


@dataclass(frozen=True)
class ThroughASet(ArithmeticTask):
    """Its questions come in the order of a set, which is that of Python's hash seed."""

    @property
    def train(self) -> Sequence[Example]:
        examples = {example.question: example for example in ArithmeticTask(**dataclasses.asdict(self)).train}
        return [examples[question] for question in set(examples)]
