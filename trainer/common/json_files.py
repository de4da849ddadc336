"""JSON that is read: every file goes through :func:`read_json`, so that a damaged one is named with what was found in
it and what to do."""

from __future__ import annotations

import codecs
import json
import math
import reprlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

COPY_AGAIN = "copy or download it again"
_LFS_POINTER = b"version https://git-lfs.github.com"
_shown = reprlib.Repr()
_shown.maxstring = 60


@dataclass(frozen=True)
class Kind:
    """What a field may hold.

    Attributes:
        words: after "must be", e.g. "a finite number".
        accepts: whether it may hold a value, the values inside left out.
        inside: the kind of each value of a list or an object.
    """

    words: str
    accepts: Callable[[Any], bool]
    inside: Kind | None = None


def whole(smallest: int, largest: float | None = None) -> Kind:
    """A whole number (no flag, no 3.0)."""
    between = f"of at least {smallest}" if largest is None else f"between {smallest} and {largest:.0f}"
    top = math.inf if largest is None else largest
    return Kind(f"a whole number {between}", lambda value: type(value) is int and smallest <= value <= top)


def optional(kind: Kind) -> Kind:
    """``kind``, or null, or nothing."""
    return Kind(f"{kind.words}, or null", lambda value: value is None or kind.accepts(value), kind.inside)


def list_of(kind: Kind) -> Kind:
    return Kind("a list", lambda value: isinstance(value, list), kind)


def object_of(kind: Kind) -> Kind:
    return Kind("an object", lambda value: isinstance(value, dict), kind)


NUMBER = Kind("a finite number", lambda value: type(value) in (int, float) and math.isfinite(value))
TEXT = Kind("text", lambda value: isinstance(value, str))
FLAG = Kind("true or false", lambda value: isinstance(value, bool))
OBJECT = Kind("an object", lambda value: isinstance(value, dict))


def read_json(path: Path, *, advice: str, fields: Mapping[str, Kind] | None = None) -> dict[str, Any]:
    """The object that a file holds.

    Args:
        advice: what to do about a damaged file, e.g. "copy or download it again".
        fields: name -> what it must hold; other fields may hold anything.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it cannot be read or is no JSON object, or a field holds something else; names file, field, what
            was found and ``advice``.
    """
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        raise
    except OSError as error:
        raise ValueError(f"{path} cannot be read ({error.strerror}): {advice}") from error
    return parse_json(content, where=str(path), advice=advice, fields=fields)


def parse_json(content: bytes, *, where: str, advice: str, fields: Mapping[str, Kind] | None = None) -> dict[str, Any]:
    """As :func:`read_json`, of what was read already from ``where`` (a file, or a line of one)."""
    problem, better_advice = foreign_content(content)
    value = None
    if problem is None:
        try:
            value = json.loads(content.decode())
            problem = None if isinstance(value, dict) else f"holds {_name_of(value)}, must hold an object"
        except UnicodeDecodeError as error:
            problem = f"is no UTF-8 text (byte {error.start})"
        except json.JSONDecodeError as error:
            is_cut = error.pos >= len(error.doc.rstrip()) or error.msg.startswith("Unterminated string")
            problem = f"is not JSON{', but cut off' if is_cut else ''} ({error})"
        except ValueError as error:  # a number of too many digits
            problem = f"is not JSON ({error})"
        except RecursionError:
            problem = "is nested too deep to be read"
    problem = problem or next(field_faults(value or {}, fields or {}), None)
    if problem is not None:
        raise ValueError(f"{where} {problem}: {better_advice or advice}")
    assert isinstance(value, dict)
    return value


def field_faults(values: Mapping[str, Any], fields: Mapping[str, Kind], prefix: str = "") -> Iterator[str]:
    """What is wrong with the fields of an object: "has no field x", or "has x=..., must be ..."."""
    for name, kind in fields.items():
        dotted, value = f"{prefix}{name}", values.get(name)
        if not kind.accepts(value):
            found = f"has {dotted}={_text_of(value)}, must be {kind.words}"
            yield found if name in values else f"has no field {dotted}, which must be {kind.words}"
        elif kind.inside is not None and value is not None:
            parts = value if isinstance(value, dict) else {str(index): part for index, part in enumerate(value)}
            yield from field_faults(parts, dict.fromkeys(parts, kind.inside), f"{dotted}.")


def foreign_content(content: bytes) -> tuple[str | None, str | None]:
    """(what a file is by its beginning, if it never was what its name says; what to do about it)."""
    if not content.strip():
        return "is empty", None
    if content.startswith(_LFS_POINTER):
        return "is a Git LFS pointer and not the file itself", "fetch it with git lfs pull"
    if content.startswith(codecs.BOM_UTF8):
        return "begins with a byte order mark", "save it as UTF-8 without one"
    if content.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        return "is UTF-16 text", "save it as UTF-8"
    if content.lstrip()[:5].lower() in (b"<!doc", b"<html"):
        return "is a web page (HTML)", "download the file itself"
    return None, None


def _name_of(value: Any) -> str:
    if value is None:
        return "null"
    names = {list: "a list", str: "text", bool: "true or false", int: "a number", float: "a number"}
    return names[type(value)]


def _text_of(value: Any) -> str:
    """As JSON writes it, shortened."""
    return json.dumps(value) if value is None or isinstance(value, bool | float) else _shown.repr(value)
