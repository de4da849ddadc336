"""The one kind of console that this project prints on."""

from typing import Any

from rich.console import Console


def new_console(**options: Any) -> Console:
    """A console that shows text as it is. Much of it is the user's (paths, tags, task settings, names of roles), and
    rich would take "[/b]" in it for markup and ":bear:" for a picture. ``options`` are rich's."""
    return Console(markup=False, emoji=False, **options)
