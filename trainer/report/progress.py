"""Progress of a run: on a terminal a live table of the latest steps over a bar, elsewhere one line per step.

Both show the same columns. The plain form writes no control codes, so it reads well in a log file.
"""

from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple, Self

from rich import box, progress
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table

from trainer.common.terminal import new_console
from trainer.common.units import format_bytes, format_count
from trainer.report.records import Record

_LATEST_STEPS = 8
_PLAIN_WARM_UP_LINES = 10


class _Column(NamedTuple):
    header: str
    width: int
    value: Callable[[Record], float | None]
    format: Callable[[float], str]

    def cell(self, record: Record) -> str:
        value = self.value(record)
        return "-" if value is None else self.format(value)


def step_seconds(record: Record) -> float:
    """Seconds of all phases of one step."""
    return sum(value for key, value in record.items() if key.startswith("seconds/") and value is not None)


_COLUMNS = (
    _Column("reward", 6, lambda r: r.get("reward"), "{:.3f}".format),
    _Column("KL", 9, lambda r: r.get("kl"), "{:.3g}".format),
    _Column("value loss", 10, lambda r: r.get("critic/loss"), "{:.3g}".format),
    _Column("entropy", 7, lambda r: r.get("entropy"), "{:.3f}".format),
    _Column("s/step", 6, step_seconds, "{:.2f}".format),
    _Column("tok/s", 5, lambda r: r.get("tokens_per_second/step"), format_count),
    _Column("MFU", 5, lambda r: r.get("mfu/step"), "{:.1%}".format),
    _Column("host RSS", 8, lambda r: r.get("host_rss_bytes"), format_bytes),
    _Column("asleep", 8, lambda r: r.get("asleep_released_bytes"), format_bytes),
    _Column("backup", 8, lambda r: r.get("asleep_backup_bytes"), format_bytes),
)

_OPTIONAL = ("KL", "value loss", "MFU")


class Progress:
    """Shows the warm-up and then the PPO steps; use it as a context manager, on rank 0 only.

    `tok/s` are the step's real tokens, all ranks together, `asleep` the bytes released by sleeping regions, `backup`
    their copies on the host. Values that are missing or null show as "-". MFU, KL and the critic's loss have columns
    only if the first step has them.
    """

    def __init__(self, steps: int, *, console: Console | None = None) -> None:
        self._steps = steps
        self._console = console if console is not None else new_console()
        self._columns: Sequence[_Column] = ()
        self._latest: deque[Sequence[str]] = deque(maxlen=_LATEST_STEPS)
        self._bars = progress.Progress(
            progress.TextColumn("{task.description}", markup=False),
            progress.BarColumn(bar_width=None),
            progress.MofNCompleteColumn(),
            progress.TimeElapsedColumn(),
            progress.TextColumn("left"),
            progress.TimeRemainingColumn(),
            progress.TextColumn("{task.fields[note]}", markup=False),
            console=self._console,
            speed_estimate_period=600,
            expand=True,
        )
        self._tasks: dict[str, progress.TaskID] = {}
        self._header_printed = False
        self._live: Live | None = None
        terminal = self._console.file.isatty()  # not console.is_terminal, which FORCE_COLOR sets for files too
        if terminal and not self._console.is_dumb_terminal:
            self._live = Live(get_renderable=self._render, console=self._console, refresh_per_second=4)

    def warm_up(self, step: int, *, total: int, loss: float) -> None:
        """Supervised step `step` of `total` is done. The plain form prints about ten of them."""
        if self._live is not None:
            self._advance("warm-up", step, total=total, note=f"loss {loss:.4f}")
        elif step == total or step % max(1, total // _PLAIN_WARM_UP_LINES) == 0:
            self._print(f"{'warm-up':>9}  {f'{step}/{total}':>11}   loss {loss:.4f}")

    def note(self, text: str) -> None:
        """One line that stays, above the live part."""
        self._console.print(text, highlight=False, soft_wrap=True)

    def step(self, record: Record) -> None:
        """PPO step `record["step"]` is done; `record` is its line of metrics.jsonl."""
        if not self._columns:
            self._columns = [c for c in _COLUMNS if c.header not in _OPTIONAL or c.value(record) is not None]
        step, cells = record["step"], [column.cell(record) for column in self._columns]
        if self._live is not None:
            self._latest.append([str(step), *cells])
            self._advance("PPO", step, total=self._steps, note="")
            return
        if not self._header_printed:
            self._print_columns("step", [column.header for column in self._columns])
            self._header_printed = True
        self._print_columns(f"{step}/{self._steps}", cells)

    def __enter__(self) -> Self:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *exception: object) -> None:
        if self._live is not None:
            self._live.stop()

    def _advance(self, name: str, step: int, *, total: int, note: str) -> None:
        if name not in self._tasks:
            # A resumed run starts its bar, and its estimate of the time left, where it resumes.
            self._tasks[name] = self._bars.add_task(f"{name:<7}", total=total, completed=step - 1, note=note)
        self._bars.update(self._tasks[name], completed=step, note=note)

    def _render(self) -> RenderableType:
        if not self._latest:
            return self._bars
        table = Table(box=box.SIMPLE_HEAD, padding=0, header_style="bold", show_edge=False)
        table.add_column("step", justify="right", min_width=4, no_wrap=True)
        for column in self._columns:
            table.add_column(column.header, justify="right", min_width=column.width, no_wrap=True)
        for index, row in enumerate(self._latest):
            table.add_row(*row, style="" if index == len(self._latest) - 1 else "dim")
        return Group(table, self._bars)

    def _print_columns(self, first: str, cells: Sequence[str]) -> None:
        width = max(5, 2 * len(str(self._steps)) + 1)
        padded = [f"{cell:>{column.width}}" for column, cell in zip(self._columns, cells, strict=True)]
        self._print("  ".join([f"{first:>{width}}", *padded]))

    def _print(self, line: str) -> None:
        self._console.print(line, highlight=False, soft_wrap=True)
