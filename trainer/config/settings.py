"""What the schema says of each setting, by the key that sets it: limits, words, and what depends on the setting.

The schema's fields say it as ``Annotated``. Whoever asks which settings matter for something asks here.
"""

from __future__ import annotations

import dataclasses
import functools
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from trainer.common.limits import Limits, Words
from trainer.config.marks import Mark, Within
from trainer.config.schema import Config, MemoryConfig


@dataclass(frozen=True)
class Setting:
    """``section``: the dataclass of the settings in it, ``of_roles`` if there is one for each role. ``said``: the
    annotations of its field. ``marks``: its own and those of the sections around it."""

    section: type | None
    of_roles: bool = False
    said: tuple[Any, ...] = ()
    marks: frozenset[Mark] = frozenset()

    @property
    def is_limited(self) -> bool:
        """Whether a value is a number within limits, or one of a few words."""
        return any(isinstance(rule, Limits | Words) for rule in self.said)

    def child(self, key: str) -> Setting:
        """The setting ``key`` in this section. Keys that no schema knows (a task's) have their section's marks."""
        if self.of_roles:
            return dataclasses.replace(self, of_roles=False)
        fields = {} if self.section is None else _fields(self.section)
        if key not in fields and self.section is MemoryConfig:  # memory.<role> stands beside its settings
            return self.child("roles").child(key)
        if key not in fields:
            within = {rule.marks[key] for rule in self.said if isinstance(rule, Within) and key in rule.marks}
            return Setting(None, marks=self.marks | within)
        said = getattr(fields[key], "__metadata__", ())
        plain = typing.get_args(fields[key])[0] if said else fields[key]
        sections = [part for part in (plain, *typing.get_args(plain)) if dataclasses.is_dataclass(part)]
        marks = self.marks | {rule for rule in said if isinstance(rule, Mark)}
        section = typing.cast("type", sections[0]) if sections else None
        return Setting(section, typing.get_origin(plain) is dict and section is not None, said, marks)


@functools.cache
def _fields(section: type) -> Mapping[str, Any]:
    return typing.get_type_hints(section, include_extras=True)


def said_of(piece: type, field: str) -> tuple[Any, ...]:
    """What a dataclass outside of the schema, a task for instance, says of one of its fields."""
    return getattr(_fields(piece).get(field), "__metadata__", ())


@functools.cache
def setting_of(key: str) -> Setting:
    """What the schema says of the setting with this dotted key, as the command line writes it."""
    setting = Setting(Config)
    for part in key.split("."):
        setting = setting.child(part)
    return setting


def is_marked(key: str, *marks: Mark) -> bool:
    """Whether the setting has one of the ``marks``."""
    return not setting_of(key).marks.isdisjoint(marks)
