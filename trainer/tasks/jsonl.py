"""Questions from a file with one JSON object a line.

Simplification: every worker reads the whole file into memory. Relative paths start where the command runs.
"""

from __future__ import annotations

import codecs
import json
import logging
import os
import random
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Optional

from trainer.common.json_files import parse_json
from trainer.tasks.base import Example, Task, check_heldout_fraction, count_heldout
from trainer.tasks.verifiers import VERIFIERS, resolve_verifier, verify

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class JsonlTask(Task):
    """A file of prompts and answers. A held-out prompt is never in ``train``, even if the files repeat it.

    Fields:
        path: the file. Its other fields become the ``metadata`` of the example.
        prompt_field, answer_field: names of the two fields; a prompt is text, an answer is text or a number, which is
            taken as it is written: ``0.00005`` is not ``5e-05``.
        heldout_path: a second file to hold out, or None to hold out a part of ``path``.
        heldout_fraction: the share of different prompts that is held out when there is no second file.
        verifier: a name in ``trainer.tasks.verifiers.VERIFIERS`` or ``package.module.function``.
        seed: chooses what is held out, and the order.
    """

    path: str
    prompt_field: str
    answer_field: str
    heldout_path: Optional[str]  # noqa: UP045  (OmegaConf's spelling)
    heldout_fraction: float
    verifier: str
    seed: int

    @cached_property
    def train(self) -> tuple[Example, ...]:
        return self._split[0]

    @cached_property
    def heldout(self) -> tuple[Example, ...]:
        return self._split[1]

    def score(self, response: str, example: Example) -> float:
        return verify(self.verifier, response, example)

    def validate(self) -> None:
        """Looks at the settings and the first line of each file; ``train`` and ``heldout`` check all."""
        resolve_verifier(self.verifier)
        for key, path in (("path", self.path), ("heldout_path", self.heldout_path)):
            if path is None:
                continue
            if not os.path.isfile(path):  # which takes any text, as Path does not
                raise ValueError(
                    f"task.{key}={path} is no file ({os.path.abspath(path)}): give a file with task.{key}=..."
                )
            next(self._read(path), None)
        if self.heldout_path is None:
            check_heldout_fraction(self.heldout_fraction)

    @cached_property
    def _split(self) -> tuple[tuple[Example, ...], tuple[Example, ...]]:
        examples = list(self._read(self.path))
        if self.heldout_path is not None:
            heldout = list(self._read(self.heldout_path))
            held_prompts = {example.question for example in heldout}
        else:
            prompts = sorted({example.question for example in examples})
            if len(prompts) < 2:
                raise ValueError(f"{self.path} has one prompt, so none can be held out: give task.heldout_path=...")
            random.Random(f"{self.seed}/split").shuffle(prompts)
            held_prompts = set(prompts[: count_heldout(len(prompts), fraction=self.heldout_fraction)])
            heldout = [example for example in examples if example.question in held_prompts]
        train = [example for example in examples if example.question not in held_prompts]
        if not train:
            raise ValueError(f"every prompt of {self.path} is in {self.heldout_path}: change task.heldout_path=...")
        if self.heldout_path is not None and len(train) < len(examples):
            _log.warning("%s: left out %d lines that are held out", self.path, len(examples) - len(train))
        random.Random(f"{self.seed}/train/order").shuffle(train)
        return tuple(train), tuple(heldout)

    def _read(self, path: str) -> Iterator[Example]:
        """The examples of one file in its order; blank lines are skipped.

        Raises:
            ValueError: a bad line, with file and line number; or no example at all.
        """
        empty = True
        with open(path, "rb") as lines:
            for number, line in enumerate(lines, start=1):
                line = line.removeprefix(codecs.BOM_UTF8) if number == 1 else line
                if line.strip():
                    empty = False
                    yield self._example(line, where=f"{path}, line {number}")
        if empty:
            raise ValueError(
                f"{path} has no lines: every line is an object with {self.prompt_field!r} and {self.answer_field!r}"
            )

    def _example(self, line: bytes, *, where: str) -> Example:
        row = parse_json(line, where=where, advice="mend the line, or leave it out")
        question = self._pop(row, "prompt_field", types=(str,), where=where)
        answer = self._pop(row, "answer_field", types=(str, int, float), where=where)
        if not isinstance(answer, str):
            answer = json.loads(line, parse_int=str, parse_float=str)[self.answer_field]
            if not isinstance(answer, str):  # NaN or Infinity, which JSON does not have and Python reads
                raise ValueError(f"{where}: field {self.answer_field!r} is {answer}, must be a finite number or text")
        example = Example(question, answer, row, origin=where)
        if self.verifier in VERIFIERS and verify(self.verifier, answer, example) == 0.0:
            raise ValueError(
                f"{where}: verifier {self.verifier!r} pays 0 for the answer {answer!r} itself: change the "
                "line or use task.verifier=exact"
            )
        return example

    def _pop(self, row: dict[str, Any], key: str, *, types: tuple[type, ...], where: str) -> Any:
        name = getattr(self, key)
        if name not in row:
            raise ValueError(f"{where}: no field {name!r} (it has {sorted(row)}): name the field with task.{key}=...")
        value = row.pop(name)
        if isinstance(value, bool) or not isinstance(value, types) or not str(value).strip():
            allowed = " or ".join(kind.__name__ for kind in types)
            raise ValueError(f"{where}: field {name!r} is {value!r}, must be {allowed} and not blank")
        return value
