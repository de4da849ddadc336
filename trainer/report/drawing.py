"""How this project's figures look, and the helpers that they share. No global state (no pyplot): Agg only.

Colours stay apart for colour-blind readers: series follow Okabe and Ito, "Color Universal Design" (2008).
"""

import io
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter

BLUE, ORANGE, GREEN, PURPLE, GREY = "#0072B2", "#D55E00", "#009E73", "#AA4499", "#666666"
STYLE: dict[Any, Any] = {
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
    "text.parse_math": False,  # labels are the user's text, in which "$" is no mathematics
}


def new_figure(*, height_inches: float) -> Figure:
    figure = Figure(figsize=(11, height_inches))
    figure.set_layout_engine("constrained", w_pad=0.1, h_pad=0.1)
    return figure


def png_of(figure: Figure) -> bytes:
    """The figure as the content of a PNG file."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    return buffer.getvalue()


def step_axis(axes: Axes, *, label: str = "PPO step") -> None:
    """Whole PPO steps along x."""
    axes.set_xlabel(label)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True, min_n_ticks=1))


def accuracy_axis(axes: Axes) -> None:
    """Held-out accuracy in percent along y, steps along x."""
    axes.set(title="Held-out accuracy", ylim=(0, 1.08))
    axes.set_yticks([0, 0.25, 0.5, 0.75, 1])
    axes.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    axes.margins(x=0.15)
    step_axis(axes, label="PPO step (0: after the warm-up)")


def floats(values: Sequence[float | None]) -> np.ndarray:
    """Values as float64, null as NaN, which matplotlib leaves out of a line."""
    return np.array([math.nan if value is None else value for value in values], dtype=np.float64)


def mean(values: np.ndarray) -> float:
    """Mean of the values that are there, NaN if none is."""
    known = values[~np.isnan(values)]
    return float(known.mean()) if known.size else math.nan
