"""What a patch is: something that replaces named attributes of another project and can put them back.

Each patch module defines one :class:`Patch` and its docstring states Target, Why, How, Upstream and Remove when.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

Replacement = tuple[Any, str, Any]  # owner, attribute name, new value


@dataclass
class Patch:
    """A reversible change of another project.

    Attributes:
        name: what ``patches.apply(name)`` and ``python -m patches`` call it.
        target: the dotted names it changes.
        why: one line for people.
        replacements: builds the (owner, attribute, new value) triples; imports the target, so call it late.
        probe: returns (state, detail) without changing anything; state is OK, CHANGED or UPSTREAMED.
    """

    name: str
    target: str
    why: str
    replacements: Callable[[], list[Replacement]]
    probe: Callable[[], tuple[str, str]]
    _originals: list[Replacement] = field(default_factory=list)

    @property
    def applied(self) -> bool:
        return bool(self._originals)

    def apply(self) -> None:
        """Replace the attributes; does nothing if that was done already."""
        if self.applied:
            return
        for owner, attribute, value in self.replacements():
            self._originals.append((owner, attribute, vars(owner)[attribute] if attribute in vars(owner) else _ABSENT))
            setattr(owner, attribute, value)

    def revert(self) -> None:
        """Put the original attributes back, in reverse order."""
        while self._originals:
            owner, attribute, value = self._originals.pop()
            if value is _ABSENT:
                delattr(owner, attribute)
            else:
                setattr(owner, attribute, value)


_ABSENT = object()
