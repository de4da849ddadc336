"""Lanes: what launches workers of its own is slow, and ``pytest -m "not slow"`` leaves it out."""

from pathlib import Path

import pytest

SLOW = [Path(__file__).parent / name for name in ("dist", "gpu")]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if any(folder in item.path.parents for folder in SLOW):
            item.add_marker("slow")
