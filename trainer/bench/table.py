"""What the measurements mean: per case the derived numbers, and all cases in one table. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from statistics import median
from typing import Any

from trainer.bench.bars import bars_table
from trainer.bench.keeper_bars import keeper_bars
from trainer.bench.swap_table import swap_table
from trainer.report.tables import UNKNOWN, Table

Record = Mapping[str, Any]

NEEDS_GPU = "needs a GPU"  # the error of a case that this machine cannot run

COLUMNS = (
    "case",
    "host B/param asleep",
    "host GiB measured (unexplained)",
    "GPU GiB left",
    "build s",
    "actor sleep s first / steady",
    "critic sleep s first / steady",
    "actor wake s",
    "critic wake s",
    "sleep GB/s (of copy)",
    "wake GB/s (of copy)",
    "cycle s",
    "floor s",
    "bits kept",
)


def summarize(record: Record) -> dict[str, Any]:
    """The numbers of one case that the table shows.

    ``steady`` times are medians over all cycles but the first. Bytes per second count what has a host copy, or lies on
    a disk; the floor of a cycle is copying that much each way at the measured rate of plain copies, or of the disk.
    """
    cycles, parameters, roofline = record["cycles"], record["parameters"], record["roofline"]
    later, last = cycles[1:] or cycles, cycles[-1]
    host = {role: _backup_bytes(last["sleep_events"], role) for role in parameters}
    total = sum(host.values())
    measured = last["memory_asleep"]["pss_bytes"] - record["memory_baseline"]["pss_bytes"]
    copied = record.get("disk_bytes", total)
    summary: dict[str, Any] = {
        "host_bytes": host,
        "host_bytes_per_parameter": {role: host[role] / parameters[role] for role in parameters},
        "measured_host_bytes": measured,
        "unexplained_share": (measured - total) / total,
        "gpu_left_bytes": last["memory_asleep"]["gpu_used_bytes"],
        "cycle_seconds": 0.0,
        "floor_seconds": None,
    }
    for name, direction in (("sleep", "to_host"), ("wake", "to_device")):
        key = f"{name}_seconds"
        steady = {role: median(cycle[key][role] for cycle in later) for role in parameters}
        rate = copied / sum(steady.values())
        summary[f"{key}_first"], summary[f"{key}_steady"] = cycles[0][key], steady
        summary[f"{name}_bytes_per_second"] = rate
        summary[f"{name}_share_of_roofline"] = rate / roofline[direction] if roofline else None
        summary["cycle_seconds"] += sum(steady.values())
    if roofline:
        summary["floor_seconds"] = copied / roofline["to_host"] + copied / roofline["to_device"]
    return summary


def _backup_bytes(events: Iterable[Record], role: str) -> int:
    return sum(event["backup_bytes"] for event in events if event["role"] == role)


def tables(records: Sequence[Record]) -> list[Table]:
    """All that a benchmark shows."""
    found = [bench_table(records), plan_comparison(records), swap_table(records), bars_table(keeper_bars(records))]
    return [table for table in found if table is not None and table.rows]


def bench_table(records: Sequence[Record]) -> Table:
    """One row per case; a case that failed, or that this machine cannot run, says so."""
    rows = []
    for record in records:
        if "summary" in record:
            rows.append(_row(record))
        elif "error" in record:
            why = "not on CPU" if record["error"] == NEEDS_GPU else "failed"
            rows.append((record["case"], why, *[UNKNOWN] * (len(COLUMNS) - 2)))
    return Table(title="Actor and critic asleep and back", columns=COLUMNS, rows=rows, text_columns=1)


def plan_comparison(records: Sequence[Record]) -> Table:
    """Per policy and role, bytes of one rank that the plan foresaw and those that the last sleep counted."""
    rows = []
    for record in (record for record in records if "plan" in record):
        events = record["cycles"][-1]["sleep_events"]
        slept = {(event["role"], event["kind"]) for event in events}
        for role in record["parameters"]:
            cells = []
            for key in ("released_bytes", "backup_bytes"):
                # The benchmark has no rollout engine and no reference model.
                planned = sum(r[key] for r in record["plan"] if r["role"] == role and (role, r["kind"]) in slept)
                measured = sum(event[key] for event in events if event["role"] == role)
                off = f"{measured / planned - 1:+.2%}" if planned else UNKNOWN
                cells += [f"{planned / 2**20:.2f}", f"{measured / 2**20:.2f}", off]
            rows.append((record["case"], role, *cells))
    header = ("case", "role", "freed: plan", "run", "off", "host: plan", "run", "off")
    return Table(title="Planned and measured, MiB per rank", columns=header, rows=rows, text_columns=2)


def _row(record: Record) -> tuple[str, ...]:
    summary, build = record["summary"], record["build_seconds"]
    per_parameter, gpu_left = summary["host_bytes_per_parameter"], summary["gpu_left_bytes"]
    first, steady = summary["sleep_seconds_first"], summary["sleep_seconds_steady"]
    wake = summary["wake_seconds_steady"]
    floor = summary["floor_seconds"]
    return (
        record["case"],
        " / ".join(f"{value:.2f}" for value in per_parameter.values()),
        f"{summary['measured_host_bytes'] / 2**30:.2f} ({summary['unexplained_share']:+.1%})",
        UNKNOWN if gpu_left is None else f"{gpu_left / 2**30:.2f}",
        f"{build:.1f}",
        *(f"{first[role]:.3f} / {steady[role]:.3f}" for role in ("actor", "critic")),
        *(f"{wake[role]:.3f}" for role in ("actor", "critic")),
        *(_rate(summary, name) for name in ("sleep", "wake")),
        f"{summary['cycle_seconds']:.3f}",
        UNKNOWN if floor is None else f"{floor:.3f}",
        "yes" if record["bits_kept"] else "NO",
    )


def _rate(summary: Record, name: str) -> str:
    share = summary[f"{name}_share_of_roofline"]
    return f"{summary[f'{name}_bytes_per_second'] / 1e9:.1f} ({UNKNOWN if share is None else f'{share:.0%}'})"


def document(records: Sequence[Record], *, cases: Mapping[str, str]) -> str:
    """bench.md: the table, what its words mean, where it was measured. ``cases``: name -> meaning."""
    facts = [f"- {line}" for line in _facts(records)]
    meanings = [f"- `{record['case']}`: {cases[record['case']]}" for record in records]
    notes = (
        "Host B/param: the ledger's host copies per parameter of the rank, actor / critic. Measured: growth of the "
        "process's proportional set from before the build to both asleep; in brackets what the ledger does not "
        "explain. GPU left: in use on the device while both sleep. First sleep in the process / median of the later "
        "ones. GB/s: bytes with a host copy over time, and the share of a plain pinned copy's rate (`disk`: "
        "of plain direct writes and reads of as many bytes there). Cycle: both "
        "roles asleep and awake again; floor: the same bytes each way at that rate. Handing over: from the end of one "
        "role's work until the other could step; floors: the same bytes one way, then the other, at those rates."
    )
    table, *others = tables(records)
    parts = [f"# {table.title}", "\n".join(facts), table.markdown(), notes, "\n".join(meanings)]
    return "\n\n".join([*parts, *(part for one in others for part in (f"## {one.title}", one.markdown()))]) + "\n"


def _facts(records: Sequence[Record]) -> Iterable[str]:
    measured = [record for record in records if "error" not in record]
    yield from dict.fromkeys(f"{r['platform']}, {r['nproc']} worker(s), {_pairs(r['versions'])}" for r in measured)
    yield from dict.fromkeys(f"parameters per rank: {_pairs(r['parameters'])}" for r in measured)
    for roofline in [r["roofline"] for r in measured if r["roofline"] and "disk_bytes" not in r][-1:]:
        yield f"plain copies: {_pairs({name: f'{rate / 1e9:.1f} GB/s' for name, rate in roofline.items()})}"


def _pairs(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in values.items())
