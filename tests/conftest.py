"""Lanes: what launches workers of its own is slow, and ``pytest -m "not slow"`` leaves it out."""

from pathlib import Path

import pytest

from trainer.common import garbage

garbage.pause()  # while tests and what they need are imported

SLOW = [Path(__file__).parent / name for name in ("dist", "gpu")]


def pytest_collection_finish() -> None:
    garbage.pass_by_what_exists()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if any(folder in item.path.parents for folder in SLOW):
            item.add_marker("slow")
