"""The bars of keepers other than the arena. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from trainer.bench.bars import Bar, most_bar, ratio_bar, share_bar

_MOST_BYTES = {"packed": 10.5, "disk": 0.5}  # of host memory asleep per parameter
_OF_PLAIN_DISK = 0.85


def keeper_bars(records: Sequence[Mapping[str, Any]]) -> list[Bar]:
    """Of the cases ``packed`` and ``disk``, where they were measured: host memory, and the time beside ``rebuild``'s or
    the rate beside that of a plain disk."""
    summaries = {record["case"]: record["summary"] for record in records if "summary" in record}
    bars = []
    for name, most in _MOST_BYTES.items():
        for role, size in summaries.get(name, {}).get("host_bytes_per_parameter", {}).items():
            bars.append(most_bar(f"{name}: host B/param of the {role}", size, at_most=most))
    for what in ("sleep", "wake"):
        key = f"{what}_seconds_steady"
        if "packed" in summaries:
            ours, theirs = (sum(summaries[n][key].values()) if n in summaries else None for n in ("packed", "rebuild"))
            bars.append(ratio_bar(f"packed: seconds of rebuild's {what}", ours, theirs, at_most=1.0))
        if "disk" in summaries:
            share = summaries["disk"][f"{what}_share_of_roofline"]
            bars.append(share_bar(f"disk: rate of a plain disk, {what}", share, at_least=_OF_PLAIN_DISK))
    return bars
