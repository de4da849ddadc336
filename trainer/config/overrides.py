"""The command line's overrides, before Hydra composes: what Hydra would end on with a traceback, or without a name."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from importlib import resources
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Glob, Override, QuotedString
from hydra.errors import HydraException

import conf

_DIGITS = re.compile(r"\d{309}")  # no float holds such an integer
_OTHERS = ("hydra", "__pycache__")
_OPTION = re.compile(r"[\w./+-]{1,100}")


def check_overrides(arguments: Iterable[str]) -> None:
    """Raise ValueError for an override whose value nothing can take; names it, and what is allowed.

    Args:
        arguments: of the command. Flags, and what Hydra's parser refuses by itself, are left to Hydra.
    """
    for argument in arguments:
        if "=" not in argument or argument.startswith("-"):
            continue
        if _DIGITS.search(argument):
            raise ValueError(f"{argument.partition('=')[0]}: a number of more than 308 digits is more than any takes")
        try:
            (override,) = OverridesParser.create().parse_overrides([argument])
        except HydraException:
            continue
        if override.key_or_group in _options() and not override.is_delete():
            _check_choice(override)


def _check_choice(override: Override) -> None:
    for choice in _values(override.value()):
        if not isinstance(choice, str) or not _OPTION.fullmatch(choice):
            given, group = override.input_line or "", override.key_or_group
            raise ValueError(
                f"{given[:200]}{'...' * (len(given) > 200)}: must be the name of an option, of which conf/{group} has "
                f"{', '.join(_options()[group])}. A single setting is {group}.<setting>=<value>"
            )


def _values(value: Any) -> Iterator[Any]:
    """The value, those of a list, or those of a sweep."""
    if isinstance(value, Glob):
        return
    for part in value if isinstance(value, list) else getattr(value, "list", [value]):
        yield part.text if isinstance(part, QuotedString) else part


@cache
def _options() -> Mapping[str, list[str]]:
    """Group -> its options, of those that lie in ``conf/``."""
    folders = [path for path in resources.files(conf).iterdir() if path.is_dir() and path.name not in _OTHERS]
    return {
        folder.name: sorted(path.name.removesuffix(".yaml") for path in folder.iterdir() if path.name.endswith(".yaml"))
        for folder in folders
    }
