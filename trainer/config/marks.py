"""What a setting is for those who compare two configs, said in the schema beside its type."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass


class Mark(enum.Enum):
    """What depends on a setting; :mod:`trainer.config.settings` looks it up."""

    OUTSIDE = "no number of a job depends on it; two configs that differ in it are the same job"
    PER_NODE = "the nodes of one job may have different values"
    WEIGHTS = "saved weights mean something else, or nothing, under another value"
    ARCHITECTURE = "as WEIGHTS, and a model folder's config.json decides it"
    CORPUS = "as WEIGHTS where the tokenizer is trained on the task"
    SEED = "runs that differ in nothing else are repetitions of one experiment"


@dataclass(frozen=True)
class Within:
    """Marks of keys in a section without a schema of its own."""

    marks: Mapping[str, Mark]
