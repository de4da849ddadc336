"""The two figures of a run. Phases are shaded in Paul Tol's "muted" scheme, "Colour Schemes" (2021)."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.patches import Patch

from trainer.common.files import write_whole
from trainer.common.units import byte_unit, time_unit
from trainer.report.drawing import (
    BLUE,
    GREEN,
    GREY,
    ORANGE,
    PURPLE,
    STYLE,
    accuracy_axis,
    floats,
    mean,
    new_figure,
    png_of,
    step_axis,
)
from trainer.report.memory import Sample, timeline
from trainer.report.records import Record

_PHASE_COLORS = (
    *("#88CCEE", "#DDCC77", "#44AA99", "#CC6677", "#999933"),
    *("#AA4499", "#332288", "#117733", "#882255", "#BBBBBB"),
)
_SHADE = 0.35
_MANY_STEPS = 60  # from here on, what sleeps in each of them would be a block of colour


def draw_training(metrics: Sequence[Record], path: Path) -> bool:
    """Reward, held-out accuracy with its standard error, KL (without a reference: gradient norm), the critic's
    explained variance (without a critic: response length) and entropy over PPO steps. Without a step: False, no file.
    """
    steps = [record for record in metrics if record["step"] > 0]
    if not steps:
        return False
    with matplotlib.rc_context(STYLE):
        figure = new_figure(height_inches=6.4)
        grid = figure.add_gridspec(2, 3)
        reward = figure.add_subplot(grid[0, :2])
        kl, middle, entropy = (figure.add_subplot(grid[1, column], sharex=reward) for column in range(3))
        _draw_metric(reward, steps, "reward", "Reward", "mean per response", BLUE)
        if any("kl" in record for record in steps):
            _draw_metric(kl, steps, "kl", "KL to the reference", "nats per token", ORANGE)
        else:
            _draw_metric(kl, steps, "actor/grad_norm", "Gradient norm of the actor", "before clipping", ORANGE)
        if any("critic/explained_variance" in record for record in steps):
            _draw_metric(middle, steps, "critic/explained_variance", "Explained variance", "of the returns", GREEN)
        else:
            _draw_metric(middle, steps, "response_length", "Response length", "tokens", GREEN)
        _draw_metric(entropy, steps, "entropy", "Entropy", "nats per token", PURPLE)
        _draw_accuracy(figure.add_subplot(grid[0, 2]), metrics)
        write_whole(path, png_of(figure))
    return True


def _draw_metric(axes: Axes, records: Sequence[Record], key: str, title: str, label: str, color: str) -> None:
    """The raw values; from 30 steps on they are faint, under their moving average."""
    steps = [record["step"] for record in records]
    values = floats([record.get(key) for record in records])
    window = len(values) // 15 if len(values) >= 30 else 1
    if window > 1:
        smooth = [mean(values[max(0, end - window) : end]) for end in range(1, len(values) + 1)]
        axes.plot(steps, values, color=color, alpha=0.35, linewidth=0.9)
        axes.plot(steps, smooth, color=color, linewidth=2, label=f"mean of the last {window} steps")
        if key == "reward":
            axes.legend(loc="lower right", bbox_to_anchor=(1, 1), borderaxespad=0.2)
    else:
        axes.plot(steps, values, color=color, marker="o", markersize=4)
    axes.set(title=title, ylabel=label)
    step_axis(axes)


def _draw_accuracy(axes: Axes, metrics: Sequence[Record]) -> None:
    records = [r for r in metrics if r.get("heldout_accuracy") is not None]
    measured = [(r["step"], r["heldout_accuracy"]) for r in records]
    accuracy_axis(axes)
    if not measured:
        return
    steps, accuracies = zip(*measured, strict=True)
    errors = [r.get("heldout_accuracy_se") or 0.0 for r in records]
    size, cap = (3, 0) if len(records) > 12 else (5, 3)
    axes.errorbar(steps, accuracies, yerr=errors, color=BLUE, marker="o", markersize=size, capsize=cap)
    above = {"xytext": (0, 8), "textcoords": "offset points", "ha": "center"}
    for step, accuracy in {measured[0], measured[-1]}:
        axes.annotate(f"{accuracy:.1%}", (step, accuracy), **above)


class _Series(NamedTuple):
    label: str
    color: str
    bytes_of: Callable[[Sample], float | None]
    holds_for_phase: bool = False  # drawn as steps: the value is that of the whole phase, not of its end


_ROWS: tuple[tuple[str, tuple[_Series, ...]], ...] = (
    (
        "Host memory",
        (_Series("RSS", BLUE, lambda s: s.rss_bytes), _Series("PSS", ORANGE, lambda s: s.pss_bytes)),
    ),
    (
        "Asleep",
        (
            _Series("released", GREEN, lambda s: s.released_bytes, holds_for_phase=True),
            _Series("backed up on the host", PURPLE, lambda s: s.backup_bytes, holds_for_phase=True),
        ),
    ),
    (
        "GPU memory",
        (
            _Series("used on the device", GREY, lambda s: s.gpu_used_bytes),
            _Series("allocated by PyTorch", BLUE, lambda s: s.gpu_allocated_bytes),
        ),
    ),
)


def draw_memory(memory: Sequence[Record], path: Path) -> bool:
    """Host, sleeping and GPU bytes of rank 0: the whole run, and beside it the last step phase by phase.

    Rows that are zero or unknown throughout are left out. Without a phase record: False, no file.
    """
    samples = timeline(memory)
    rows = [(title, series) for title, series in _ROWS if any(s.bytes_of(x) for s in series for x in samples)]
    if not rows:
        return False
    first = next(i for i, sample in enumerate(samples) if sample.step == samples[-1].step)
    last_step = samples[max(0, first - 1) :]  # from the end of the phase before: there its first phase starts
    with matplotlib.rc_context(STYLE):
        figure = new_figure(height_inches=1.2 + 2.5 * len(rows))
        grid = figure.subplots(len(rows), 2, sharex="col", sharey="row", squeeze=False, width_ratios=(3, 2))
        for (whole, close), (title, series) in zip(grid, rows, strict=True):
            largest_bytes = max(series_.bytes_of(sample) or 0 for series_ in series for sample in samples)
            unit, size = byte_unit(largest_bytes)
            _draw_bytes(whole, samples, series, size=size)
            if samples[-1].step - samples[0].step >= _MANY_STEPS and any(series_.holds_for_phase for series_ in series):
                title += ", range of each step"
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
        write_whole(path, png_of(figure))
    return True


def _draw_bytes(axes: Axes, samples: Sequence[Sample], series: Sequence[_Series], *, size: int) -> None:
    by_step: dict[int, list[int]] = {}
    for number, sample in enumerate(samples):
        by_step.setdefault(sample.step, []).append(number)
    for label, color, bytes_of, holds_for_phase in series:
        sizes = floats([bytes_of(sample) for sample in samples])
        if holds_for_phase and len(by_step) > _MANY_STEPS:
            ends = np.asarray(_clock(samples))[[numbers[-1] for numbers in by_step.values()]]
            least, most = (
                np.array([of(sizes[numbers]) for numbers in by_step.values()]) / size for of in (np.min, np.max)
            )
            axes.fill_between(ends, least, most, color=color, alpha=_SHADE, linewidth=0, label=label)
            axes.plot(ends, most, color=color)
            continue
        known = np.isfinite(sizes)  # PSS is sampled now and then only
        axes.plot(
            np.asarray(_clock(samples))[known],
            sizes[known] / size,
            color=color,
            label=label,
            drawstyle="steps-pre" if holds_for_phase else "default",
            marker="o" if len(samples) <= 30 and not holds_for_phase else None,
            markersize=4,
        )
    axes.margins(x=0.01)


def _shade_phases(axes: Axes, samples: Sequence[Sample]) -> None:
    ends, names = _clock(samples), list(dict.fromkeys(sample.phase for sample in samples[1:]))
    for start, end, sample in zip(ends, ends[1:], samples[1:], strict=False):
        axes.axvspan(start, end, color=_phase_color(names.index(sample.phase)), alpha=_SHADE, linewidth=0)
    axes.grid(False)


def _clock(samples: Sequence[Sample]) -> list[float]:
    size = time_unit(_duration_seconds(samples))[1]
    return [(sample.end_seconds - samples[0].end_seconds) / size for sample in samples]


def _duration_seconds(samples: Sequence[Sample]) -> float:
    return samples[-1].end_seconds - samples[0].end_seconds


def _phase_color(index: int) -> str:
    return _PHASE_COLORS[index % len(_PHASE_COLORS)]
