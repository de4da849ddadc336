"""What hand-overs took, beside plain copies of the same bytes. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from trainer.bench.bars import ratio_bar
from trainer.report.tables import UNKNOWN, Table

Record = Mapping[str, Any]
_BAR = 0.68  # of the seconds of the same copies one after the other


def swap_table(records: Sequence[Record]) -> Table | None:
    """Of each case the median hand-over both ways, without the first, beside the floors; None if none was measured."""
    rows = [_row(r, way) for r in records if "hand_overs" in r for way in (("actor", "critic"), ("critic", "actor"))]
    columns = (
        "case",
        "from",
        "to",
        "out GiB",
        "in GiB",
        "s",
        "floor out s",
        "in s",
        "of their sum",
        "bar",
        "bits kept",
    )
    return Table(title="Handing the GPU over", columns=columns, rows=rows, text_columns=3) if rows else None


def _row(record: Record, way: tuple[str, str]) -> tuple[str, ...]:
    found = [one for one in record["hand_overs"] if (one["from"], one["to"]) == way]
    later = found[1:] or found
    out, back, seconds = (median(one[key] for one in later) for key in ("to_host_bytes", "to_device_bytes", "seconds"))
    rates = record["roofline"]
    floors = (out / rates["to_host"], back / rates["to_device"]) if rates else ()
    bar = ratio_bar("", seconds, sum(floors), at_most=_BAR)
    verdict = {True: "yes", False: "NO", None: UNKNOWN}[bar.is_met]
    shown = [f"{floor:.3f}" for floor in floors] or [UNKNOWN, UNKNOWN]
    sizes = (f"{size / 2**30:.2f}" for size in (out, back))
    kept = "yes" if record["bits_kept"] else "NO"
    return (record["case"], *way, *sizes, f"{seconds:.3f}", *shown, bar.measured, f"{bar.must_be}: {verdict}", kept)
