"""The two figures of a run, drawn with matplotlib's Agg backend and no global state (no pyplot).

Colours stay apart for colour-blind readers: series follow Okabe and Ito, "Color Universal Design" (2008),
phases Paul Tol's "muted" scheme, "Colour Schemes" (2021).
"""

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator, PercentFormatter

from trainer.report.records import Record
from trainer.report.units import byte_unit, time_unit

_BLUE, _ORANGE, _GREEN, _PURPLE, _GREY = "#0072B2", "#D55E00", "#009E73", "#AA4499", "#666666"
_PHASE_COLORS = (
    *("#88CCEE", "#DDCC77", "#44AA99", "#CC6677", "#999933"),
    *("#AA4499", "#332288", "#117733", "#882255", "#BBBBBB"),
)
_SHADE = 0.35
_STYLE: dict[Any, Any] = {
    "axes.axisbelow": True,
    "axes.grid": True,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlelocation": "left",
    "axes.titlesize": 11,
    "axes.titleweight": "bold",
    "figure.dpi": 150,
    "font.size": 10,
    "grid.color": "#E4E4E4",
    "grid.linewidth": 0.8,
    "legend.frameon": False,
    "lines.linewidth": 1.6,
}


def draw_training(metrics: Sequence[Record], path: Path) -> bool:
    """Reward, held-out accuracy, KL, value loss and entropy over PPO steps. Without one: False, no file."""
    steps = [record for record in metrics if record["step"] > 0]
    if not steps:
        return False
    with matplotlib.rc_context(_STYLE):
        figure = _figure(height_inches=6.4)
        grid = figure.add_gridspec(2, 3)
        reward = figure.add_subplot(grid[0, :2])
        kl, loss, entropy = (figure.add_subplot(grid[1, column], sharex=reward) for column in range(3))
        _draw_metric(reward, steps, "reward", "Reward", "mean per response", _BLUE)
        _draw_metric(kl, steps, "kl", "KL to the reference", "nats per token", _ORANGE)
        _draw_metric(loss, steps, "critic/loss", "Value loss", "loss", _GREEN)
        _draw_metric(entropy, steps, "entropy", "Entropy", "nats per token", _PURPLE)
        _draw_accuracy(figure.add_subplot(grid[0, 2]), metrics)
        figure.savefig(path)
    return True


def _figure(*, height_inches: float) -> Figure:
    figure = Figure(figsize=(11, height_inches))
    figure.set_layout_engine("constrained", w_pad=0.1, h_pad=0.1)
    return figure


def _draw_metric(axes: Axes, records: Sequence[Record], key: str, title: str, label: str, color: str) -> None:
    """The raw values; from 30 steps on they are faint, under their moving average."""
    steps = [record["step"] for record in records]
    values = _floats([record.get(key) for record in records])
    window = len(values) // 15 if len(values) >= 30 else 1
    if window > 1:
        smooth = [_mean(values[max(0, end - window) : end]) for end in range(1, len(values) + 1)]
        axes.plot(steps, values, color=color, alpha=0.35, linewidth=0.9)
        axes.plot(steps, smooth, color=color, linewidth=2, label=f"mean of the last {window} steps")
        if key == "reward":
            axes.legend(loc="lower right", bbox_to_anchor=(1, 1), borderaxespad=0.2)
    else:
        axes.plot(steps, values, color=color, marker="o", markersize=4)
    axes.set(title=title, xlabel="PPO step", ylabel=label)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True, min_n_ticks=1))


def _draw_accuracy(axes: Axes, metrics: Sequence[Record]) -> None:
    measured = [(r["step"], r["heldout_accuracy"]) for r in metrics if r.get("heldout_accuracy") is not None]
    axes.set(title="Held-out accuracy", xlabel="PPO step (0: after the warm-up)", ylim=(0, 1.08))
    axes.set_yticks([0, 0.25, 0.5, 0.75, 1])
    axes.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    axes.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True, min_n_ticks=1))
    axes.margins(x=0.15)
    if not measured:
        return
    steps, accuracies = zip(*measured, strict=True)
    axes.plot(steps, accuracies, color=_BLUE, marker="o", markersize=6)
    above = {"xytext": (0, 8), "textcoords": "offset points", "ha": "center"}
    for step, accuracy in {measured[0], measured[-1]}:
        axes.annotate(f"{accuracy:.1%}", (step, accuracy), **above)


class _Sample(NamedTuple):
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


def _timeline(memory: Sequence[Record]) -> list[_Sample]:
    samples: list[_Sample] = []
    asleep: dict[tuple[str, str], Record] = {}
    working: list[Record] = []
    start_seconds = next((r["time_seconds"] for r in memory if "time_seconds" in r), 0)
    for r in memory:
        if "state" not in r:
            sample = _Sample(
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


class _Series(NamedTuple):
    label: str
    color: str
    bytes_of: Callable[[_Sample], float | None]
    holds_for_phase: bool = False  # drawn as steps: the value is that of the whole phase, not of its end


_ROWS: tuple[tuple[str, tuple[_Series, ...]], ...] = (
    (
        "Host memory",
        (_Series("RSS", _BLUE, lambda s: s.rss_bytes), _Series("PSS", _ORANGE, lambda s: s.pss_bytes)),
    ),
    (
        "Asleep",
        (
            _Series("released", _GREEN, lambda s: s.released_bytes, holds_for_phase=True),
            _Series("backed up on the host", _PURPLE, lambda s: s.backup_bytes, holds_for_phase=True),
        ),
    ),
    (
        "GPU memory",
        (
            _Series("used on the device", _GREY, lambda s: s.gpu_used_bytes),
            _Series("allocated by PyTorch", _BLUE, lambda s: s.gpu_allocated_bytes),
        ),
    ),
)


def draw_memory(memory: Sequence[Record], path: Path) -> bool:
    """Host, sleeping and GPU bytes of rank 0: the whole run, and beside it the last step phase by phase.

    Rows that are zero or unknown throughout are left out. Without a phase record: False, no file.
    """
    samples = _timeline(memory)
    rows = [(title, series) for title, series in _ROWS if any(s.bytes_of(x) for s in series for x in samples)]
    if not rows:
        return False
    first = next(i for i, sample in enumerate(samples) if sample.step == samples[-1].step)
    last_step = samples[max(0, first - 1) :]  # from the end of the phase before: there its first phase starts
    with matplotlib.rc_context(_STYLE):
        figure = _figure(height_inches=1.2 + 2.5 * len(rows))
        grid = figure.subplots(len(rows), 2, sharex="col", sharey="row", squeeze=False, width_ratios=(3, 2))
        for (whole, close), (title, series) in zip(grid, rows, strict=True):
            largest_bytes = max(series_.bytes_of(sample) or 0 for series_ in series for sample in samples)
            unit, size = byte_unit(largest_bytes)
            _draw_bytes(whole, samples, series, size=size)
            _shade_phases(close, last_step)
            _draw_bytes(close, last_step, series, size=size)
            whole.set(title=title, ylabel=unit, ylim=(0, 1.1 * largest_bytes / size))
            whole.legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=2, borderaxespad=0.2)
        grid[-1, 0].set_xlabel(f"{time_unit(_duration_seconds(samples))[0]} since the first phase ended")
        grid[-1, 1].set_xlabel(time_unit(_duration_seconds(last_step))[0])
        grid[0, 1].set_title(f"Step {samples[-1].step}, phase by phase")
        names = dict.fromkeys(sample.phase for sample in last_step[1:])
        patches = [Patch(color=_phase_color(i), alpha=_SHADE, label=name) for i, name in enumerate(names)]
        figure.legend(handles=patches, loc="outside lower center", ncols=min(5, len(names)), fontsize=9)
        figure.savefig(path)
    return True


def _draw_bytes(axes: Axes, samples: Sequence[_Sample], series: Sequence[_Series], *, size: int) -> None:
    for label, color, bytes_of, holds_for_phase in series:
        axes.plot(
            _clock(samples),
            _floats([bytes_of(sample) for sample in samples]) / size,
            color=color,
            label=label,
            drawstyle="steps-pre" if holds_for_phase else "default",
            marker="o" if len(samples) <= 30 and not holds_for_phase else None,
            markersize=4,
        )
    axes.margins(x=0.01)


def _shade_phases(axes: Axes, samples: Sequence[_Sample]) -> None:
    ends, names = _clock(samples), list(dict.fromkeys(sample.phase for sample in samples[1:]))
    for start, end, sample in zip(ends, ends[1:], samples[1:], strict=False):
        axes.axvspan(start, end, color=_phase_color(names.index(sample.phase)), alpha=_SHADE, linewidth=0)
    axes.grid(False)


def _clock(samples: Sequence[_Sample]) -> list[float]:
    size = time_unit(_duration_seconds(samples))[1]
    return [(sample.end_seconds - samples[0].end_seconds) / size for sample in samples]


def _duration_seconds(samples: Sequence[_Sample]) -> float:
    return samples[-1].end_seconds - samples[0].end_seconds


def _phase_color(index: int) -> str:
    return _PHASE_COLORS[index % len(_PHASE_COLORS)]


def _floats(values: Sequence[float | None]) -> np.ndarray:
    """Values as float64, null as NaN, which matplotlib leaves out of a line."""
    return np.array([math.nan if value is None else value for value in values], dtype=np.float64)


def _mean(values: np.ndarray) -> float:
    """Mean of the values that are there, NaN if none is."""
    known = values[~np.isnan(values)]
    return float(known.mean()) if known.size else math.nan
