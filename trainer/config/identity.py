"""Which settings make a run what it is: its plain values, those that decide what it computes, and their hash."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from typing import Any

from trainer.config.marks import Mark
from trainer.config.schema import Config
from trainer.config.settings import is_marked


def to_plain(config: Config) -> dict[str, Any]:
    """Nested plain dicts of every resolved value, under the keys by which the command line sets them; what
    ``config_hash`` hashes and runs record."""
    settings = dataclasses.asdict(config)
    memory = settings["memory"]
    return settings | {"memory": {**memory.pop("roles"), **memory}}


def decisive(settings: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """``to_plain``'s settings without those that do not change what the job computes: where its nodes meet, how often
    it is restarted, what the machine has, what is optimised of it."""
    return {
        key: decisive(value, f"{prefix}{key}.") if isinstance(value, Mapping) else value
        for key, value in settings.items()
        if not is_marked(f"{prefix}{key}", Mark.OUTSIDE)
    }


def config_hash(config: Config) -> str:
    """First 16 hex digits of the SHA-256 of what decides: equal hashes mean equal runs on one machine."""
    text = json.dumps(decisive(to_plain(config)), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]
