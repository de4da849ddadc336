"""A schedule as a table and a figure: phases across, regions down. Pure, but for the figure's file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from trainer.common.files import write_whole
from trainer.common.units import byte_unit
from trainer.report.records import Record
from trainer.report.tables import UNKNOWN, Table

_AWAKE = ("used", "stays", "goes", "comes")
_NO_LIMIT_BYTES = 2**61  # room above it is a limit that nobody knows


def schedule_table(rows: Sequence[Record]) -> Table:
    """``rows``: of :func:`trainer.plan.schedule_rows.schedule_rows`. What is awake, asleep and on its way, with the
    bytes that are copied at the boundary before a phase, or beside its work (+; * while another region comes or
    leaves)."""
    phases, regions = _names(rows)
    cells = {(row["region"], row["phase"]): row for row in rows}
    unit, size = byte_unit(max(row["size_bytes"] for row in rows))

    def mark(row: Record) -> str:
        return "*" if row["swaps"] else "+" if row["beside"] else ""

    def cell(row: Record) -> str:
        copies = [
            f"{way} {row[key] / size:.2f}{mark(row)}"
            for way, key in (("out", "out_bytes"), ("in", "in_bytes"))
            if row[key]
        ]
        return " ".join([row["state"], *copies])

    def total(name: str, amount_of: Mapping[str, int]) -> tuple[str, ...]:
        return (name, "", *(f"{amount_of[phase] / size:.2f}" for phase in phases))

    awake = {p: sum(r["size_bytes"] for r in rows if r["phase"] == p and r["state"] in _AWAKE) for p in phases}
    reserve = {p: next(r["reserve_bytes"] for r in rows if r["phase"] == p) for p in phases}
    room = rows[0]["room_bytes"]
    limit = "no limit known" if room > _NO_LIMIT_BYTES else f"{room / size:.2f} {unit}"
    return Table(
        title=f"What sleeps when, in {unit} per rank (room: {limit}; out, in: copied before the phase, + beside it, "
        "* in each other's place)",
        columns=("region", "size", *phases),
        rows=[
            (name, f"{cells[name, phases[0]]['size_bytes'] / size:.2f}", *(cell(cells[name, p]) for p in phases))
            for name in regions
        ],
        totals=[total("awake", awake), total("reserve", reserve)],
    )


def moves_table(
    rows: Sequence[Record], *, seconds: Mapping[str, float] | None = None, metrics: Sequence[Record] = ()
) -> Table:
    """Bytes that one step copies each way and the seconds that takes, predicted, and where ``metrics`` have them the
    measured ones of a median step beside it. The first step, after which the schedule may change, and those that
    evaluate, for which more may move, do not count."""
    out, back = (sum(row[key] for row in rows) for key in ("out_bytes", "in_bytes"))
    measured = [r for r in metrics if r["step"] > 1 and "moved_to_host_bytes" in r and "heldout_accuracy" not in r]
    unit, size = byte_unit(max([out, back, *(r["moved_to_host_bytes"] for r in measured)]))

    def middle(key: str, per: float) -> str:
        values = sorted(record[key] for record in measured)
        return f"{values[len(values) // 2] / per:.2f}" if values else UNKNOWN

    lines = [
        (f"to the host, {unit}", f"{out / size:.2f}", middle("moved_to_host_bytes", size)),
        (f"back, {unit}", f"{back / size:.2f}", middle("moved_to_device_bytes", size)),
    ]
    if seconds is not None:
        lines.append(("seconds between phases", f"{seconds['exposed']:.3f}", middle("moving_seconds", 1)))
        lines.append(("seconds beside work", f"{seconds['beside']:.3f}", UNKNOWN))
    return Table(title="Copies of one step", columns=("", "planned", "measured"), rows=lines)


def draw_schedule(rows: Sequence[Record], path: Path) -> None:
    """Phases across, regions down, each as high as its size lets it be told from the others."""
    import matplotlib
    from matplotlib.patches import Patch, Rectangle

    from trainer.report.drawing import BLUE, GREY, ORANGE, STYLE, new_figure, png_of

    looks = {
        "used": (BLUE, "used"),
        "stays": ("#A9CBE3", "awake, not used"),
        "goes": (ORANGE, "moving beside the work"),
        "comes": (ORANGE, "moving beside the work"),
        "asleep": ("#F2F2F2", "asleep"),
    }
    phases, regions = _names(rows)
    unit, size = byte_unit(max(row["size_bytes"] for row in rows))
    with matplotlib.rc_context(STYLE):
        figure = new_figure(height_inches=1.6 + 0.42 * len(regions))
        axes = figure.add_subplot()
        for row in rows:
            x, y = phases.index(row["phase"]), regions.index(row["region"])
            axes.add_patch(Rectangle((x + 0.02, y - 0.42), 0.96, 0.84, color=looks[row["state"]][0], linewidth=0))
            text = _arrows(row, size)
            if text:
                beside = row["state"] in ("goes", "comes")
                place = (x + 0.5, "center") if beside else (x + 0.05, "left")
                dark = row["state"] in ("used", "goes", "comes")
                axes.text(place[0], y, text, ha=place[1], va="center", fontsize=8, color="white" if dark else "black")
        names = {row["region"]: f"{row['region']}  {row['size_bytes'] / size:.2f}" for row in rows}
        axes.set(xlim=(0, len(phases)), ylim=(len(regions) - 0.5, -0.5))
        axes.set_title(f"What sleeps when ({unit} per rank; ▲ to the host, ▼ back, before the phase or beside it)")
        axes.set_yticks(range(len(regions)), [names[name] for name in regions])
        axes.set_xticks([place + 0.5 for place in range(len(phases))], phases)
        axes.tick_params(length=0)
        axes.grid(False)
        for side in ("left", "bottom"):
            axes.spines[side].set_visible(False)
        for place in range(1, len(phases)):
            axes.axvline(place, color=GREY, linewidth=0.6)
        shown = {row["state"] for row in rows}
        named = {label: color for state, (color, label) in looks.items() if state in shown}
        handles = [Patch(color=color, label=label) for label, color in named.items()]
        figure.legend(handles=handles, loc="outside lower center", ncols=4, fontsize=9)
        write_whole(path, png_of(figure))


def _arrows(row: Record, size: int) -> str:
    parts = [f"{arrow} {row[key] / size:.2f}" for arrow, key in (("▲", "out_bytes"), ("▼", "in_bytes")) if row[key]]
    return " ".join(parts)


def _names(rows: Sequence[Record]) -> tuple[list[str], list[str]]:
    return list(dict.fromkeys(row["phase"] for row in rows)), list(dict.fromkeys(row["region"] for row in rows))
