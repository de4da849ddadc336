"""Bytes, seconds and settings for people."""

from collections.abc import Iterator, Mapping
from typing import Any

_BYTE_UNITS = (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10), ("B", 1))
_TIME_UNITS = (("hours", 3600), ("minutes", 60), ("seconds", 1))


def byte_unit(largest_bytes: float) -> tuple[str, int]:
    """The largest binary unit in which `largest_bytes` is at least 1, as (name, bytes)."""
    return next(((name, size) for name, size in _BYTE_UNITS if largest_bytes >= size), _BYTE_UNITS[-1])


def time_unit(longest_seconds: float) -> tuple[str, int]:
    """The largest unit in which `longest_seconds` is at least 5, as (name, seconds)."""
    return next(((name, size) for name, size in _TIME_UNITS if longest_seconds >= 5 * size), _TIME_UNITS[-1])


def format_bytes(value_bytes: float) -> str:
    """Three significant digits, at most eight characters: "1.21 GiB", "12.1 MiB", "1023 KiB", "7 B"."""
    name, size = byte_unit(value_bytes)
    value = value_bytes / size
    digits = 0 if name == "B" or value >= 99.95 else 1 if value >= 9.995 else 2
    return f"{value:.{digits}f} {name}"


def format_count(count: float) -> str:
    """Three significant digits, at most five characters: "7.00", "998", "12.3k", "1.25M"."""
    for size, suffix in ((1e9, "G"), (1e6, "M"), (1e3, "k"), (1, "")):
        if count >= size * 0.9995 or size == 1:
            value = count / size
            digits = 0 if value >= 99.95 else 1 if value >= 9.995 else 2
            return f"{value:.{digits}f}{suffix}"
    raise AssertionError(count)


def leaves(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted key, value) of nested mappings."""
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def format_setting(value: Any) -> str:
    """A config value as the command line writes it."""
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
