"""What a patch is: something that replaces named attributes of another project and can put them back.

Each patch module defines one :class:`Patch` and its docstring states Target, Why, How, Upstream and Remove when.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
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
        probe: returns (state, detail) without changing anything in this process; state is OK, CHANGED or UPSTREAMED.
        after: patches that must be in force before this one, where they are to be at all.
    """

    name: str
    target: str
    why: str
    replacements: Callable[[], list[Replacement]]
    probe: Callable[[], tuple[str, str]]
    after: tuple[str, ...] = ()
    _originals: list[Replacement] = field(default_factory=list)

    @property
    def applied(self) -> bool:
        return bool(self._originals)

    def apply(self) -> None:
        """Replace the attributes; does nothing if that was done already. Raises RuntimeError if one does not exist."""
        if self.applied:
            return
        replacements = self.replacements()
        missing = missing_names(replacements)
        if missing:
            raise RuntimeError(
                f"the patch {self.name} replaces {', '.join(missing)}, which the installed version lacks"
            )
        for owner, attribute, value in replacements:
            self._originals.append((owner, attribute, vars(owner).get(attribute, _ABSENT)))
            setattr(owner, attribute, value)

    def revert(self) -> None:
        """Put the original attributes back, in reverse order."""
        while self._originals:
            owner, attribute, value = self._originals.pop()
            if value is _ABSENT:
                delattr(owner, attribute)
            else:
                setattr(owner, attribute, value)


_ABSENT = object()  # marks an attribute that the owner inherits: reverting deletes ours


def missing_names(replacements: Iterable[Replacement]) -> list[str]:
    """Dotted names among the targets that do not exist; setting them would silently patch nothing."""
    targets = [(owner, attribute) for owner, attribute, _ in replacements if not hasattr(owner, attribute)]
    return [f"{getattr(owner, '__name__', type(owner).__name__)}.{attribute}" for owner, attribute in targets]
