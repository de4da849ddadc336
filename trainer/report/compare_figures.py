"""The figures that compare runs, as PNG bytes: bytes by owner, memory by phase, seconds against bytes, learning.

A group of runs (see :mod:`trainer.report.compare_groups`) keeps its colour, line and marker in every figure.
"""

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from trainer.common.units import byte_unit, format_bytes
from trainer.report.compare import Run
from trainer.report.compare_groups import Group, alike, joined_label, ledger, pareto_front
from trainer.report.drawing import (
    BLUE,
    GREEN,
    GREY,
    ORANGE,
    PURPLE,
    STYLE,
    accuracy_axis,
    floats,
    new_figure,
    png_of,
    step_axis,
)
from trainer.report.memory import OWNERS, Sample

_COLORS = (BLUE, ORANGE, GREEN, PURPLE, "#56B4E9", "#B8860B", "#332288", "#222222")
_LINES, _MARKERS = ("-", (0, (5, 2)), (0, (1.5, 1.5))), "os^DvPX"
_OWNER_LOOKS = ((BLUE, ""), ("#56B4E9", ""), ("#E69F00", ""), ("#F5D9A0", "///"))
_LONGEST_LABEL = 56


class Drawing(NamedTuple):
    """One figure: ``name`` for its file, ``caption`` says what is shown and what is not."""

    name: str
    title: str
    caption: str
    png: bytes


def draw_all(groups: Sequence[Group]) -> list[Drawing]:
    """The figures for which there are numbers."""
    with matplotlib.rc_context(STYLE):
        drawn = [draw(groups) for draw in (_draw_owners, _draw_phases, _draw_seconds, _draw_learning)]
    return [drawing for drawing in drawn if drawing is not None]


def _drawing(figure: Figure, name: str, title: str, caption: str) -> Drawing:
    return Drawing(name, title, caption, png_of(figure))


def _look(index: int) -> dict:
    rounds = index // len(_COLORS)
    line, marker = _LINES[rounds % len(_LINES)], _MARKERS[index % len(_MARKERS)]
    return {"color": _COLORS[index % len(_COLORS)], "linestyle": line, "marker": marker}


def _short(groups: Sequence[Group]) -> str:
    """The label; one too long for a figure is cut, behind the name of the first run, so that it stays unique."""
    label = joined_label(groups)
    cut = f"{groups[0].runs[0].name}: {label}"[: _LONGEST_LABEL - 1]
    return label if len(label) <= _LONGEST_LABEL else f"{cut}…"


def _legend(figure: Figure, axes: Axes) -> None:
    handles, labels = axes.get_legend_handles_labels()
    columns = max(1, min(4, len(labels), 120 // (6 + max(map(len, labels), default=1))))
    figure.legend(handles, labels, loc="outside lower center", ncols=columns, fontsize=9, handlelength=3)


def _draw_owners(groups: Sequence[Group]) -> Drawing | None:
    merged = alike([group for group in groups if ledger(group)], ledger)
    bars = [
        (i, members[0], role)
        for i, members in enumerate(merged)
        for role in dict.fromkeys(role for run in members[0].runs for role in run.host_bytes)
    ]
    if not bars:
        return None
    figure = new_figure(height_inches=1.5 + 0.32 * len(bars))
    axes = figure.subplots()
    totals = [group.median(lambda run, role=role: run.bytes_of(role)) or 0 for _, group, role in bars]
    unit, size = byte_unit(max(totals))
    starts = [0.0] * len(bars)
    rows = [row + 0.4 * i for row, (i, _, _) in enumerate(bars)]
    for owner, (color, hatch) in zip(OWNERS, _OWNER_LOOKS, strict=True):
        widths = [(group.median(lambda run, r=role, o=owner: run.kept(r, o)) or 0) / size for _, group, role in bars]
        if any(widths):
            axes.barh(rows, widths, left=starts, color=color, hatch=hatch, edgecolor="white", label=owner)
        starts = [start + width for start, width in zip(starts, widths, strict=True)]
    for row, total, (_, group, role) in zip(rows, totals, bars, strict=True):
        per = group.median(lambda run, role=role: run.bytes_per_parameter(role))
        text = f" {format_bytes(total)}" + ("" if per is None else f" = {per:.1f} B/param")
        axes.annotate(text, (total / size, row), va="center", fontsize=9)
    axes.set_yticks(rows, [f"{_short(merged[i])}  {role}" for i, _, role in bars])
    axes.set(xlabel=f"{unit} on the host while the role sleeps", xlim=(0, 1.5 * max(totals) / size))
    axes.margins(y=0.5 / len(bars))
    axes.invert_yaxis()
    axes.grid(axis="y", visible=False)
    figure.legend(loc="outside lower center", ncols=len(OWNERS))
    return _drawing(
        figure,
        "owners",
        "Who keeps what on the host while a role sleeps",
        "Ledger of rank 0 at the last sleep; median over seeds. Own tag: the weights that wake up again; other tags: "
        "the reference model and further weights.",
    )


class _Row(NamedTuple):
    title: str
    bytes_of: Callable[[Sample], float | None]
    holds_for_phase: bool = False


_ROWS = (
    _Row("Host memory (RSS)", lambda sample: sample.rss_bytes),
    _Row("Backed up on the host", lambda sample: sample.backup_bytes, holds_for_phase=True),
    _Row("GPU memory used", lambda sample: sample.gpu_used_bytes),
)


def _draw_phases(groups: Sequence[Group]) -> Drawing | None:
    shown = [(i, _short([group]), run.samples) for i, group in enumerate(groups) if (run := _longest(group))]
    rows = [row for row in _ROWS if any(row.bytes_of(s) for _, _, samples in shown for s in samples)]
    if not rows:
        return None
    figure = new_figure(height_inches=1.4 + 2.5 * len(rows) + 0.06 * len(shown))
    grid = figure.subplots(len(rows), 2, sharex="col", sharey="row", squeeze=False, width_ratios=(3, 2))
    last_steps = [(i, _last_step(samples)) for i, _, samples in shown]
    names = max(([sample.phase for sample in samples] for _, samples in last_steps), key=len)
    for (whole, close), row in zip(grid, rows, strict=True):
        byte, size = byte_unit(max(row.bytes_of(s) or 0 for _, _, samples in shown for s in samples))
        for i, label, samples in shown:
            largest = _largest_per_step(samples, row)
            look = _look(i) | {"markersize": 4, "marker": _look(i)["marker"] if len(largest) <= 30 else None}
            whole.plot(list(largest), floats(list(largest.values())) / size, label=label, **look)
        for i, samples in last_steps:
            if [sample.phase for sample in samples] == names:
                values = floats([row.bytes_of(sample) for sample in samples]) / size
                drawstyle = "steps-mid" if row.holds_for_phase else "default"
                close.plot(range(len(names)), values, markersize=4, drawstyle=drawstyle, **_look(i))
        whole.set(title=f"{row.title}, largest of each step", ylabel=byte)
    grid[0, 1].set_title("Last step, phase by phase")
    step_axis(grid[-1, 0], label="PPO step (0: build and warm-up)")
    grid[-1, 1].set_xticks(range(len(names)), names, rotation=60, ha="right", fontsize=8)
    _legend(figure, grid[0, 0])
    caption = "Rank 0 of each group's longest run, sampled as every phase ends. Backed up: what sleeping regions keep "
    caption += "while the phase works. Axes need not start at zero; equal lines cover each other."
    return _drawing(figure, "phases", "Memory over time, by phase", caption)


def _longest(group: Group) -> Run | None:
    return max((run for run in group.runs if run.samples), key=lambda run: len(run.samples), default=None)


def _largest_per_step(samples: Sequence[Sample], row: _Row) -> dict[int, float | None]:
    largest: dict[int, float | None] = {}
    for sample in samples:
        known = [x for x in (largest.get(sample.step), row.bytes_of(sample)) if x is not None]
        largest[sample.step] = max(known, default=None)
    return largest


def _last_step(samples: Sequence[Sample]) -> list[Sample]:
    """The samples of the last step; a phase that comes twice in a row is one."""
    last = [sample for sample in samples if sample.step == samples[-1].step]
    return [s for i, s in enumerate(last) if i + 1 == len(last) or s.phase != last[i + 1].phase]


def _draw_seconds(groups: Sequence[Group]) -> Drawing | None:
    panels: tuple[tuple[str, Callable[[Run], float | None]], ...] = (
        ("Sleep", lambda run: run.sleep_seconds),
        ("Wake-up", lambda run: run.wake_seconds),
        ("Whole PPO step", lambda run: run.step_seconds),
    )

    def measured(run: Run) -> bool:
        return bool(run.all_bytes) and all(value(run) is not None for _, value in panels)

    known = [(i, group) for i, group in enumerate(groups) if any(map(measured, group.runs))]
    if not known:
        return None
    unit, size = byte_unit(max(run.all_bytes or 0 for _, group in known for run in group.runs))
    figure = new_figure(height_inches=4.2 + 0.12 * len(known))
    for axes, (title, value) in zip(figure.subplots(1, len(panels)), panels, strict=True):
        points = []
        longest = max(value(run) or 0 for _, group in known for run in group.runs)
        time, factor = ("seconds", 1) if longest >= 0.5 else ("milliseconds", 1000)
        for i, group in known:
            look = _look(i) | {"linestyle": "none"}
            pairs = [((run.all_bytes or 0) / size, (value(run) or 0) * factor) for run in group.runs if measured(run)]
            if len(pairs) > 1:
                axes.plot(*zip(*pairs, strict=True), markersize=4, alpha=0.45, **look)
            points.append((statistics.median(x for x, _ in pairs), statistics.median(y for _, y in pairs)))
            axes.plot(*points[-1], markersize=8, label=_short([group]), **look)
        front = [points[i] for i in pareto_front(points)]
        line = {"color": GREY, "linewidth": 1, "zorder": 1, "drawstyle": "steps-post"}
        axes.plot(*zip(*front, strict=True), **line)
        ring = {"marker": "o", "linestyle": "none", "markersize": 15, "markerfacecolor": "none"}
        axes.plot(*zip(*front, strict=True), color=GREY, label="on the Pareto front", **ring)
        axes.set(title=title, xlabel=f"{unit} on the host, all asleep", ylabel=time)
        axes.margins(x=0.15, y=0.15)
        axes.set_ylim(bottom=0)
        left, right = axes.get_xlim()
        middle = (left + right) / 2
        axes.set_xlim(min(left, 0.9 * middle), max(right, 1.1 * middle))  # bytes that hardly differ lie together
        axes.xaxis.set_major_locator(MaxNLocator(nbins=5))
    _legend(figure, figure.axes[0])
    return _drawing(
        figure,
        "seconds",
        "Seconds against host bytes",
        "Large: median over seeds, small: single runs. Sleep and wake-up: all regions once, each at its median over "
        "the run, restoring or rebuilding weights included; what a side stream still copies then counts in the whole "
        "step only. Of the ringed groups none is beaten in both bytes and seconds.",
    )


def _draw_learning(groups: Sequence[Group]) -> Drawing | None:
    values: tuple[Callable[[Run], Mapping[int, float]], ...] = (lambda run: run.rewards, lambda run: run.accuracies)
    merged = alike(groups, lambda group: [group.curves(value) for value in values])
    if not any(value(run) for value in values for group in groups for run in group.runs):
        return None
    figure = new_figure(height_inches=4.6 + 0.12 * len(merged))
    reward, accuracy = figure.subplots(1, 2, width_ratios=(3, 2))
    for axes, value in zip((reward, accuracy), values, strict=True):
        for members in merged:
            curve = members[0].curves(value)
            steps, means = list(curve), [sum(values) / len(values) for values in curve.values()]
            look = _look(groups.index(members[0])) | ({"marker": None} if len(steps) > 30 else {"markersize": 4})
            axes.plot(steps, means, label=_short(members), **look)
            low, high = ([end(values) for values in curve.values()] for end in (min, max))
            axes.fill_between(steps, low, high, color=look["color"], alpha=0.15, linewidth=0)
    reward.set(title="Reward", ylabel="mean per response")
    step_axis(reward)
    accuracy_axis(accuracy)
    _legend(figure, reward)
    counts = sorted({len(group.runs) for group in groups})
    return _drawing(
        figure,
        "learning",
        "Learning",
        f"Line: mean over seeds, band: smallest to largest; {' or '.join(map(str, counts))} run(s) per group. "
        "Groups whose values are equal in every step share one line.",
    )
