"""The base of every section of a config."""

from __future__ import annotations

import dataclasses
from typing import Any


class Section:
    """Base of every section: each field is set once, by the constructor.

    ``@dataclass(frozen=True)`` would say the same, but omegaconf marks nodes of frozen dataclasses read-only, and
    Hydra could then override nothing in them.
    """

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self.__dict__:
            raise dataclasses.FrozenInstanceError(f"cannot assign to {type(self).__name__}.{name}")
        object.__setattr__(self, name, value)

    def __delattr__(self, name: str) -> None:
        raise dataclasses.FrozenInstanceError(f"cannot delete {type(self).__name__}.{name}")
