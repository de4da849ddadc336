"""What memory.jsonl says: what slept when, what that kept on the host, who kept it. Pure."""

import statistics
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from trainer.report.records import Record

OWNERS = ("saver", "arena", "backuper, own tag", "backuper, other tags")
_IN_ARENAS = ("arena", "packed", "disk")  # keepers whose host memory is arenas


class Sample(NamedTuple):
    """Memory at the end of one phase, `end_seconds` after the first sample.

    Sleeping bytes are those while the phase worked: after its last wake-up, or as it began if nothing woke.
    """

    step: int
    phase: str
    end_seconds: float
    rss_bytes: float | None
    pss_bytes: float | None
    gpu_allocated_bytes: float | None
    gpu_used_bytes: float | None
    released_bytes: float
    backup_bytes: float


class LedgerLine(NamedTuple):
    """What one owner holds on rank 0 while every model sleeps. ``slack_bytes``: what of its host bytes exceeds those
    that the plan counts (alignment; on a GPU the unused ends of segments)."""

    owner: str
    what: str
    host_bytes: int
    slack_bytes: int | None = None
    gpu_bytes: int | None = None


def timeline(memory: Sequence[Record]) -> list[Sample]:
    """One sample per phase, in order."""
    samples: list[Sample] = []
    asleep: dict[tuple[str, str], Record] = {}
    working: list[Record] = []
    start_seconds = next((r["time_seconds"] for r in memory if "time_seconds" in r), 0)
    for r in memory:
        if "moment" in r:
            continue
        if "state" not in r:
            sample = Sample(
                step=r["step"],
                phase=r["phase"],
                end_seconds=r["time_seconds"] - start_seconds,
                rss_bytes=r["rss_bytes"],
                pss_bytes=r["pss_bytes"],
                gpu_allocated_bytes=r["gpu_allocated_bytes"],
                gpu_used_bytes=r["gpu_used_bytes"],
                released_bytes=sum(region["released_bytes"] for region in working),
                backup_bytes=sum(region["backup_bytes"] for region in working),
            )
            samples.append(sample)
            working = list(asleep.values())
        elif r["state"] == "asleep":
            asleep[r["role"], r["kind"]] = r
        else:
            asleep.pop((r["role"], r["kind"]), None)
            working = list(asleep.values())
    return samples


def last_sleeps(memory: Iterable[Record]) -> dict[tuple[str, str], Record]:
    """(role, kind) -> the record of when that region last fell asleep."""
    return {(r["role"], r["kind"]): r for r in memory if r.get("state") == "asleep"}


def median_seconds(memory: Iterable[Record], *, region: Record, state: str) -> float | None:
    """Median time that a region took to get into ``state``: the first sleep alone pays for pinning host memory."""
    same = ("role", "kind")
    times = [r["seconds"] for r in memory if r.get("state") == state and all(r[k] == region[k] for k in same)]
    return statistics.median(times) if times else None


def host_bytes_by_owner(memory: Iterable[Record]) -> dict[str, dict[str, int]]:
    """role -> owner (one of ``OWNERS``) -> bytes that it keeps on the host while the role sleeps, on rank 0.

    A record holds one number per region. Where the backuper restores a region that the saver copies all the same (its
    flag is unset), the saver's part of that number is what the region released.
    """
    result: dict[str, dict[str, int]] = {}
    for (role, kind), record in last_sleeps(memory).items():
        owners = result.setdefault(role, dict.fromkeys(OWNERS, 0))
        backup_bytes, keeper = record["backup_bytes"], record["keeper"]
        if kind.startswith("weights/"):
            owners["backuper, own tag" if kind == f"weights/{role}" else "backuper, other tags"] += backup_bytes
        elif keeper == "backuper":
            saver_bytes = min(record["released_bytes"], backup_bytes) if record["flag"] is False else 0
            owners["saver"] += saver_bytes
            owners["backuper, own tag"] += backup_bytes - saver_bytes
        else:
            owners["arena" if keeper in _IN_ARENAS else "saver"] += backup_bytes
    return {role: owners for role, owners in result.items() if any(owners.values())}


def ledger(memory: Sequence[Record], *, plan: Sequence[Record]) -> list[LedgerLine]:
    """What was there before anything was built, what each owner keeps, what torch holds outside the regions, and in
    the last three lines the sum, what was measured and what of that is unexplained. Empty for a run that broke off."""
    moments = {r["moment"]: r for r in memory if "moment" in r}
    if moments.keys() != {"baseline", "asleep"}:
        return []
    before, asleep, slept = moments["baseline"], moments["asleep"], last_sleeps(memory)
    planned = {(row["role"], row["kind"]): row["backup_bytes"] for row in plan}
    lines = [LedgerLine("process", "before anything was built", before["pss_bytes"], None, before["gpu_used_bytes"])]
    for key, r in slept.items():
        if r["backup_bytes"]:
            slack = r["backup_bytes"] - planned[key] if key in planned else None
            lines.append(LedgerLine(r["keeper"], " ".join(key), r["backup_bytes"], slack))
    if asleep["gpu_used_bytes"] is not None:
        # torch counts the blocks of a region that sleeps as reserved; they take no memory then.
        outside = asleep["gpu_reserved_bytes"] - sum(r["released_bytes"] for r in slept.values())
        lines.append(LedgerLine("torch", "blocks outside the regions", 0, None, outside))
    host = sum(line.host_bytes for line in lines)
    gpu, gpu_rest = None, None
    if asleep["gpu_used_bytes"] is not None:
        gpu = sum(line.gpu_bytes or 0 for line in lines)
        gpu_rest = asleep["gpu_used_bytes"] - gpu
    rest = asleep["pss_bytes"] - host
    return [
        *lines,
        LedgerLine("sum", "", host, None, gpu),
        LedgerLine("measured", "PSS, GPU memory in use", asleep["pss_bytes"], None, asleep["gpu_used_bytes"]),
        LedgerLine("unexplained", f"{rest / asleep['pss_bytes']:.1%} of the host's", rest, None, gpu_rest),
    ]
