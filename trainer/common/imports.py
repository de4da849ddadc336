"""Objects that a setting names by their dotted path, of this project or of the user's."""

import importlib
import traceback
from functools import reduce
from types import ModuleType
from typing import Any


def import_named(name: str, *, setting: str) -> Any:
    """The object ``package.module.name``.

    Raises:
        ValueError: there is no such module or name, or the module raised something when it was imported, a SyntaxError
            for instance; names the setting and, where a module failed, its line.
    """
    parts = name.split(".")
    if len(parts) < 2 or not all(part.isidentifier() for part in parts):
        raise ValueError(f"{setting}={name} cannot be imported: it must be a dotted path like package.module.name")
    module = None
    for end in range(len(parts) - 1, 0, -1):  # the rest may be a class inside a class
        module = _import(parts[:end], f"{setting}={name} cannot be imported")
        if module is not None:
            break
    if module is None:
        raise ValueError(
            f"{setting}={name} cannot be imported: No module named {parts[0]!r}. Install the package, or put its "
            "folder on PYTHONPATH"
        )
    try:
        return reduce(getattr, parts[end:], module)
    except AttributeError as error:
        raise ValueError(f"{setting}={name} cannot be imported: {error}") from error


def _import(parts: list[str], problem: str) -> ModuleType | None:
    """The module; None if there is none of that name."""
    module = ".".join(parts)
    try:
        return importlib.import_module(module)
    except SyntaxError as error:
        where = f"({error.filename}, line {error.lineno})"
        raise ValueError(f"{problem}: {type(error).__name__}: {error.msg} {where}") from error
    except (Exception, SystemExit) as error:  # the latter: a script that runs when it is imported
        if isinstance(error, ModuleNotFoundError) and f"{module}.".startswith(f"{error.name}."):
            return None
        frames = [frame for frame in traceback.extract_tb(error.__traceback__) if "<frozen" not in frame.filename]
        where = f"({frames[-1].filename}, line {frames[-1].lineno})"
        raise ValueError(f"{problem}: {type(error).__name__}: {error} {where}") from error
