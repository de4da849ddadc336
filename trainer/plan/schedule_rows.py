"""A schedule as plain rows, for tables, figures and records."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import resources
from typing import Any

import yaml

from trainer.plan import Plan
from trainer.plan.schedule import Schedule


def schedule_rows(schedule: Schedule) -> list[dict[str, Any]]:
    """One row per region and phase of the step: its state, its size, and what is copied out and back then (``beside``
    the phase's work, or at the boundary before it; ``swaps``: piece by piece, both ways at once)."""
    rows = []
    for region in sorted(schedule.regions, key=lambda region: -region.size_bytes):
        for phase in schedule.phases:
            moves = [m for m in schedule.moves if (m.region, m.phase) == (region.name, phase.name)]
            rows.append(
                {
                    "region": region.name,
                    "phase": phase.name,
                    "state": schedule.state(region.name, phase.name).value,
                    "size_bytes": region.size_bytes,
                    "out_bytes": sum(m.size_bytes for m in moves if m.to_host),
                    "in_bytes": sum(m.size_bytes for m in moves if not m.to_host),
                    "beside": any(m.beside for m in moves),
                    "swaps": any(m.swaps for m in moves),
                    "reserve_bytes": phase.reserve_bytes,
                    "room_bytes": schedule.room_bytes,
                }
            )
    return rows


def default_rates() -> dict[str, float]:
    """``plan.bus_gb_per_s`` and ``plan.disk_gb_per_s`` as ``conf/plan.yaml`` has them."""
    settings = yaml.safe_load(resources.files("conf").joinpath("plan.yaml").read_text())["plan"]
    return {name: settings[name] for name in ("bus_gb_per_s", "disk_gb_per_s")}


def predicted_seconds(
    schedule: Schedule, plan: Plan, *, bus_gb_per_s: float, disk_gb_per_s: float
) -> Mapping[str, float]:
    """Of one step's copies: ``exposed``, those at boundaries, which nothing hides, and ``beside`` the phases' work."""
    on_disk = {row.tag for row in plan.rows if row.keeper == "disk"}
    seconds = {"exposed": 0.0, "beside": 0.0}
    for move in schedule.moves:
        rate = disk_gb_per_s if move.region in on_disk else bus_gb_per_s
        seconds["beside" if move.beside else "exposed"] += move.size_bytes / (rate * 1e9)
    return seconds
