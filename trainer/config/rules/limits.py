"""Settings judged by themselves, as the schema's fields say; rules that join several are in the other modules.

``model`` and ``optimizer`` settings are judged at the top level and in every role.
"""

from __future__ import annotations

from trainer.common.limits import check_value
from trainer.common.units import leaves
from trainer.config.identity import to_plain
from trainer.config.pieces import piece_classes
from trainer.config.schema import Config
from trainer.config.settings import said_of, setting_of


def check_values(config: Config) -> None:
    """Every number is finite and within its limits, every word is one of its few."""
    pieces = piece_classes(config)
    for key, value in leaves(to_plain(config)):
        section, _, field = key.partition(".")
        said = said_of(pieces[section], field) if section in pieces else setting_of(key).said
        check_value(key, value, said)


def model_key(config: Config, role: str, field: str) -> str:
    """The override that changes the setting: the top-level one as long as the role agrees with it."""
    shared = getattr(config.model, field) == getattr(config.roles[role].model, field)
    return f"model.{field}" if shared else f"roles.{role}.model.{field}"
