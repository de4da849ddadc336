"""Settings judged by themselves, as the schema's fields say; rules that join several are in the other modules.

``model`` and ``optimizer`` settings are judged at the top level and in every role.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from trainer.common.limits import check_value
from trainer.config.identity import to_plain
from trainer.config.pieces import piece_classes
from trainer.config.schema import Config
from trainer.config.settings import said_of, setting_of


def check_values(config: Config) -> None:
    """Every number is finite and within its limits, every word is one of its few."""
    pieces = piece_classes(config)
    for key, value in _settings(to_plain(config)):
        section, _, field = key.partition(".")
        said = said_of(pieces[section], field) if section in pieces else setting_of(key).said
        check_value(key, value, said)


def _settings(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted key, value); of a setting that has limits or words also a mapping is a value, and a wrong one."""
    for key, value in values.items():
        if isinstance(value, Mapping) and not setting_of(f"{prefix}{key}").is_limited:
            yield from _settings(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def model_key(config: Config, role: str, field: str) -> str:
    """The override that changes the setting: the top-level one as long as the role agrees with it."""
    shared = getattr(config.model, field) == getattr(config.roles[role].model, field)
    return f"model.{field}" if shared else f"roles.{role}.model.{field}"
