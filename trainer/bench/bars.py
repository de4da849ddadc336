"""Bars that a benchmark measures this project by, as a table that says which are met."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from trainer.report.tables import UNKNOWN, Table


@dataclass(frozen=True)
class Bar:
    """What was measured beside what it must be; ``is_met`` is None where nothing could be measured."""

    name: str
    must_be: str
    measured: str
    is_met: bool | None


def ratio_bar(name: str, ours: float | None, theirs: float | None, *, at_most: float) -> Bar:
    """``ours`` is at most so many times ``theirs``."""
    if ours is None or not theirs:
        return Bar(name, f"<= {at_most:g} x", UNKNOWN, None)
    return Bar(name, f"<= {at_most:g} x", f"{ours / theirs:.2f} x", ours <= at_most * theirs)


def most_bar(name: str, measured: float, *, at_most: float) -> Bar:
    """A number is at most so large."""
    return Bar(name, f"<= {at_most:g}", f"{measured:.2f}", measured <= at_most)


def share_bar(name: str, measured: float | None, *, at_least: float) -> Bar:
    """A share of a whole is at least so large."""
    if measured is None:
        return Bar(name, f">= {at_least:.0%}", UNKNOWN, None)
    return Bar(name, f">= {at_least:.0%}", f"{measured:.1%}", measured >= at_least)


def bars_table(bars: Sequence[Bar]) -> Table:
    verdicts = {True: "yes", False: "NO", None: UNKNOWN}
    rows = [(bar.name, bar.must_be, bar.measured, verdicts[bar.is_met]) for bar in bars]
    return Table(title="Bars", columns=("bar", "must be", "measured", "met"), rows=rows)
