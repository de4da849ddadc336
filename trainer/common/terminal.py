"""The one kind of console that this project prints on."""

import sys
from contextlib import suppress
from typing import Any

from rich.console import Console


def new_console(**options: Any) -> Console:
    """A console that shows text as it is. Much of it is the user's (paths, tags, task settings, names of roles), and
    rich would take "[/b]" in it for markup and ":bear:" for a picture. ``options`` are rich's."""
    return Console(markup=False, emoji=False, **options)


def tell(text: str) -> None:
    """Print on stderr, unless the terminal has been closed: what follows must happen all the same."""
    with suppress(OSError):
        print(text, file=sys.stderr, flush=True)
