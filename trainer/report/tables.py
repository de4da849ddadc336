"""The numbers of a run as tables, each written once and shown by rich and in Markdown alike."""

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape

from rich import box
from rich import table as rich_table

from trainer.common.units import byte_unit, format_count
from trainer.report.memory import LedgerLine, last_sleeps, ledger, median_seconds
from trainer.report.progress import step_seconds
from trainer.report.records import Record

UNKNOWN = "-"
_WIDEST_UNWRAPPED = 14
_SIZES = ("released_bytes", "backup_bytes")
_STATES = ("asleep", "awake", "restored")


@dataclass(frozen=True, kw_only=True)
class Table:
    """Cells are ready text. The first `text_columns` columns are left-aligned, the others hold numbers.

    Rows in `totals` close the table. `console.print(table)` shows it with rich.
    """

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    totals: Sequence[Sequence[str]] = ()
    text_columns: int = 1

    def __rich__(self) -> rich_table.Table:
        table = rich_table.Table(title=self.title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
        for index, column in enumerate(self.columns):
            # Headers and long notes wrap on a narrow terminal, cells do not.
            widest = max((len(row[index]) for row in (*self.rows, *self.totals)), default=0)
            justify = "left" if index < self.text_columns else "right"
            narrowest = min(widest, _WIDEST_UNWRAPPED)
            table.add_column(column, justify=justify, min_width=narrowest, overflow="fold")
        for row in self.rows:
            table.add_row(*row)
        table.add_section()
        for row in self.totals:
            table.add_row(*row, style="bold")
        return table

    def markdown(self) -> str:
        rules = [":---" if index < self.text_columns else "---:" for index in range(len(self.columns))]
        bold = [[f"**{cell}**" if cell else "" for cell in row] for row in self.totals]
        lines = [self.columns, rules, *self.rows, *bold]
        escaped = [[cell.replace("|", "\\|") for cell in line] for line in lines]
        return "\n".join(f"| {' | '.join(line)} |" for line in escaped)

    def html(self) -> str:
        """A ``<table>`` with the title as its caption; class ``text`` marks the left-aligned cells."""

        def line(tag: str, cells: Sequence[str]) -> str:
            kinds = [' class="text"' if index < self.text_columns else "" for index in range(len(cells))]
            return (
                "<tr>" + "".join(f"<{tag}{k}>{escape(c)}</{tag}>" for k, c in zip(kinds, cells, strict=True)) + "</tr>"
            )

        body = [*(line("td", row) for row in self.rows), *(line("th", row) for row in self.totals)]
        rows = "\n".join([line("th", self.columns), *body])
        return f"<table>\n<caption>{escape(self.title)}</caption>\n{rows}\n</table>"


def final_tables(metrics: Sequence[Record], memory: Sequence[Record], *, plan: Sequence[Record] = ()) -> list[Table]:
    """Held-out accuracy, memory while asleep, what ``plan`` predicted of it, and seconds per phase; a table without
    rows is left out."""
    parameters = {
        key.removeprefix("parameters/"): value
        for record in metrics
        for key, value in record.items()
        if key.startswith("parameters/")
    }
    tables = (
        accuracy_table(metrics),
        sleep_table(memory, parameters=parameters),
        prediction_table(memory, plan=plan),
        ledger_table(memory, plan=plan),
        phase_table(metrics),
    )
    return [table for table in tables if table.rows]


def plan_table(rows: Sequence[Record]) -> Table:
    """The plan, known before the launch: per role and buffer kind (or weights tag) one {role, kind, keeper, flag, note,
    released_bytes, backup_bytes}."""
    unit, size = byte_unit(max((max(row[key] for key in _SIZES) for row in rows), default=0))
    total = [f"{sum(row[key] for row in rows) / size:.2f}" for key in _SIZES]
    return Table(
        title=(
            f"Who keeps what while it sleeps: {unit} per rank (flag: disable_*_buffers_cpu_backup; n/a: not applicable)"
        ),
        columns=("role", "buffer", "keeper", "flag", "note", "freed", "on host"),
        rows=[
            (
                *(row[key] for key in ("role", "kind", "keeper")),
                _flag(row["flag"]),
                row["note"],
                *(f"{row[key] / size:.2f}" for key in _SIZES),
            )
            for row in rows
        ],
        totals=[("all", "all", "", "", "", *total)],
        text_columns=5,
    )


def prediction_table(memory: Sequence[Record], *, plan: Sequence[Record]) -> Table:
    """What the plan foresaw beside what rank 0 did when each region last fell asleep. Regions hold whole pages (on a
    GPU whole segments of 2 MiB), so a small one is larger than its tensors."""
    slept = {(r["role"], r["kind"]): r for r in memory if r.get("state") == "asleep"}
    pairs = [(row, slept[row["role"], row["kind"]]) for row in plan if (row["role"], row["kind"]) in slept]
    unit, size = byte_unit(max((r["released_bytes"] for r in slept.values()), default=0))

    def cells(predicted_and_measured: Sequence[tuple[Record, Record]]) -> list[str]:
        found = []
        for key in _SIZES:
            predicted, measured = (sum(pair[side][key] for pair in predicted_and_measured) for side in (0, 1))
            is_shown = predicted / size >= 0.005
            off = f"{measured / predicted - 1:+.1%}" if is_shown else UNKNOWN
            found += [f"{predicted / size:.2f}", f"{measured / size:.2f}", off]
        return found

    return Table(
        title=f"Predicted and measured: {unit} freed and kept on the host",
        columns=("role", "buffer", "freed: plan", "run", "off", "host: plan", "run", "off"),
        rows=[(row["role"], row["kind"], *cells([(row, measured)])) for row, measured in pairs],
        totals=[("all", "all", *cells(pairs))] if pairs else [],
        text_columns=2,
    )


def ledger_table(memory: Sequence[Record], *, plan: Sequence[Record]) -> Table:
    """Every byte of rank 0 while all models sleep, by owner, and what none of them explains."""
    lines = ledger(memory, plan=plan)
    on_gpu = any(line.gpu_bytes is not None for line in lines)
    unit, size = byte_unit(max((line.host_bytes for line in lines), default=0))

    def cells(line: LedgerLine) -> tuple[str, ...]:
        amounts = (line.host_bytes, line.slack_bytes, *([line.gpu_bytes] if on_gpu else []))
        return line.owner, line.what, *("" if amount is None else f"{amount / size:.3f}" for amount in amounts)

    return Table(
        title=f"Who holds what while everything sleeps, and what that leaves unexplained: {unit} of rank 0",
        columns=("owner", "what", "host", "of it slack", *(["GPU"] if on_gpu else [])),
        rows=[cells(line) for line in lines[:-3]],
        totals=[cells(line) for line in lines[-3:]],
        text_columns=2,
    )


def accuracy_table(metrics: Sequence[Record]) -> Table:
    """Held-out accuracy when the warm-up ends (step 0) and at the last step that measured it."""
    measured = {r["step"]: r for r in metrics if r.get("heldout_accuracy") is not None}
    rows = [("after the warm-up", "0", accuracy_text(measured[0]))] if 0 in measured else []
    last = max(measured, default=0)
    if last > 0:
        rows.append(("at the end", str(last), accuracy_text(measured[last])))
    points = 100 * (measured[last]["heldout_accuracy"] - measured[0]["heldout_accuracy"]) if len(rows) == 2 else None
    gained = [] if points is None else [("gained", "", f"{points:+.2f} points")]
    problems = measured[last].get("heldout_problems") if measured else None
    title = "Held-out accuracy" + (f", {problems} problems, with its standard error" if problems else "")
    return Table(title=title, columns=("when", "step", "accuracy"), rows=rows, totals=gained)


def accuracy_text(record: Record) -> str:
    """The held-out accuracy of a record that has one, with its standard error where there is one."""
    error = record.get("heldout_accuracy_se")
    return f"{record['heldout_accuracy']:.2%}" + ("" if error is None else f" ± {100 * error:.2f}")


def sleep_table(memory: Sequence[Record], *, parameters: Record) -> Table:
    """What every region released and backed up when it last fell asleep, in bytes of rank 0.

    Args:
        memory: the records of memory.jsonl.
        parameters: how many parameters of each role those bytes belong to, by role.
    """
    last_sleep = last_sleeps(memory)
    unit, size = byte_unit(max((r["released_bytes"] for r in last_sleep.values()), default=0))

    def amounts(regions: Iterable[Record], per: int | None) -> tuple[str, str, str]:
        released, backup = (sum(r[key] for r in regions) for key in _SIZES)
        host_bytes_per_parameter = f"{backup / per:.2f}" if per else UNKNOWN
        return f"{released / size:.2f}", f"{backup / size:.2f}", host_bytes_per_parameter

    rows, totals = [], []
    for role in dict.fromkeys(role for role, _ in last_sleep):
        regions = [region for region in last_sleep.values() if region["role"] == role]
        count = parameters.get(role)
        for r in regions:
            sleep, mapped, restored = (median_seconds(memory, region=r, state=state) for state in _STATES)
            wake = mapped if restored is None or mapped is None else mapped + restored
            seconds = text(sleep, ".3f"), text(wake, ".3f")
            rows.append((role, r["kind"], r["keeper"], _flag(r["flag"]), *amounts([r], count), *seconds))
        totals.append((role, "all", "", "", *amounts(regions, count), "", ""))
    if len(totals) > 1:
        totals.append(("all", "all", "", "", *amounts(last_sleep.values(), None)[:2], "", "", ""))
    title = f"Memory while asleep: {unit} freed and backed up on the host, host bytes per parameter, median seconds"
    header = ("role", "buffer", "keeper", "flag", "freed", "backed up", "B/param", "sleep", "wake")
    return Table(title=title, columns=header, rows=rows, totals=totals, text_columns=4)


def phase_table(metrics: Sequence[Record]) -> Table:
    """Seconds per phase of the PPO steps; the share is that of all phases together. Tokens per second (all ranks) and
    MFU, columns that are there if any step has them, are means over the time; see `trainer.measure.throughput`."""
    seconds: dict[str, list[float]] = {}
    steps = [record for record in metrics if record["step"] > 0]
    for record in steps:
        for key, value in record.items():
            if key.startswith("seconds/") and value is not None:
                seconds.setdefault(key.removeprefix("seconds/"), []).append(value)
    total = sum(map(sum, seconds.values()))
    rates = {"tokens_per_second": ("tokens/s", format_count), "mfu": ("MFU", "{:.1%}".format)}
    shown = {k: v for k, v in rates.items() if any(record.get(f"{k}/step") is not None for record in steps)}

    def row(phase: str, values: Sequence[float], mean: float) -> tuple[str, ...]:
        means = [_mean_rate(steps, rate, phase) for rate in shown]
        cells = [UNKNOWN if m is None else form(m) for m, (_, form) in zip(means, shown.values(), strict=True)]
        return phase, f"{mean:.3f}", f"{sum(values):.2f}", _share(sum(values), total), *cells

    rows = [row(phase, values, statistics.fmean(values)) for phase, values in seconds.items()]
    return Table(
        title="Seconds per phase",
        columns=("phase", "mean (s)", "total (s)", "share of step", *(header for header, _ in shown.values())),
        rows=rows,
        totals=[row("step", [total], total / len(steps))] if rows else [],
    )


def _mean_rate(steps: Sequence[Record], rate: str, phase: str) -> float | None:
    """Mean over the time that ``phase`` took, which for "step" is all phases' (evaluations included)."""
    rated = [record for record in steps if record.get(f"{rate}/{phase}") is not None]
    weights = [step_seconds(r) if phase == "step" else r[f"seconds/{phase}"] for r in rated]
    weighted = sum(record[f"{rate}/{phase}"] * weight for record, weight in zip(rated, weights, strict=True))
    return weighted / sum(weights) if rated else None


def _flag(flag: bool | None) -> str:
    return "n/a" if flag is None else "set" if flag else "unset"


def _share(part: float, whole: float) -> str:
    return f"{part / whole:.1%}" if whole else UNKNOWN


def text(value: float | None, form: str) -> str:
    """A number in a format such as ".2f", or UNKNOWN."""
    return UNKNOWN if value is None else format(value, form)
