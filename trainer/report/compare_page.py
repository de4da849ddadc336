"""The comparison of runs as tables, Markdown, CSV and one HTML page that needs no other file."""

import base64
import csv
import io
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from trainer.common.files import write_whole
from trainer.common.units import byte_unit, format_setting
from trainer.report.compare import Run, read_runs
from trainer.report.compare_groups import (
    Group,
    alike,
    differing,
    group_runs,
    joined_label,
    ledger,
    telling_keys,
)
from trainer.report.memory import OWNERS
from trainer.report.tables import UNKNOWN, Table, text

PAGE_FILE, MARKDOWN_FILE, CSV_FILE = "comparison.html", "comparison.md", "comparison.csv"
_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #222; max-width: 1100px; margin: 2rem auto; padding: 0 1rem }
h1 { font-size: 1.5rem } h2 { font-size: 1.15rem; margin: 2rem 0 .3rem } p { color: #555; margin: .2rem 0 .8rem }
img { width: 100%; height: auto } .wide { overflow-x: auto } table { border-collapse: collapse; margin: 1.5rem 0 }
caption { text-align: left; font-weight: 600; padding-bottom: .4rem } tr:nth-child(odd) td { background: #f6f6f6 }
th, td { padding: .2rem .7rem; text-align: right; vertical-align: top; font-variant-numeric: tabular-nums }
th { border-bottom: 1px solid #999 } .text { text-align: left; overflow-wrap: break-word }
"""


@dataclass(frozen=True)
class Comparison:
    """What was read, as tables (for the terminal too), and the page that was written."""

    facts: Sequence[str]
    tables: Sequence[Table]
    page: Path


def write_comparison(directories: Iterable[Path], *, output: Path) -> Comparison:
    """Compare all runs at or below ``directories``; write the page, Markdown, CSV and figures into ``output``.

    Raises:
        ValueError: a directory does not exist or holds no run.
    """
    from trainer.report.compare_figures import draw_all  # matplotlib waits until it is needed

    runs = read_runs(directories)
    groups = group_runs(runs)
    tables, facts, drawings = comparison_tables(runs, groups), _facts(runs), draw_all(groups)
    output.mkdir(parents=True, exist_ok=True)
    title = f"Comparison: {output.resolve().name}"
    markdown = [f"# {title}", "\n".join(f"- {fact}" for fact in facts)]
    markdown += [f"## {table.title}\n\n{table.markdown()}" for table in tables]
    page = [f"<h1>{escape(title)}</h1>", "<ul>", *(f"<li>{escape(fact)}</li>" for fact in facts), "</ul>"]
    page += [f'<div class="wide">{table.html()}</div>' for table in tables]
    for drawing in drawings:
        path = output / f"comparison_{drawing.name}.png"
        write_whole(path, drawing.png)
        markdown.append(f"## {drawing.title}\n\n{drawing.caption}\n\n![{drawing.title}]({path.name})")
        source = f"data:image/png;base64,{base64.b64encode(drawing.png).decode()}"
        page.append(f"<h2>{escape(drawing.title)}</h2>\n<p>{escape(drawing.caption)}</p>")
        page.append(f'<img src="{source}" alt="{escape(drawing.title)}">')
    write_whole(output / MARKDOWN_FILE, "\n\n".join(markdown) + "\n")
    head = f'<meta charset="utf-8"><title>{escape(title)}</title>\n<style>{_STYLE}</style>'
    html = f'<!doctype html>\n<html lang="en"><head>{head}</head><body>\n' + "\n".join(page) + "\n</body></html>\n"
    write_whole(output / PAGE_FILE, html)
    rows = io.StringIO(newline="")
    csv.writer(rows).writerows(csv_rows(runs))
    write_whole(output / CSV_FILE, rows.getvalue())
    return Comparison(facts, tables, output / PAGE_FILE)


def comparison_tables(runs: Sequence[Run], groups: Sequence[Group]) -> list[Table]:
    """Runs; who keeps what; which settings differ; why runs are not finished. A table without rows is left out."""
    tables = (_run_table(runs, groups), _owner_table(groups), _settings_table(runs), _note_table(runs))
    return [table for table in tables if table.rows]


def _facts(runs: Sequence[Run]) -> list[str]:
    states = [run.state for run in runs]
    counts = ", ".join(f"{states.count(state)} {state}" for state in dict.fromkeys(states))
    facts = [f"{len(runs)} runs: {counts}"]
    platforms = dict.fromkeys(str(run.settings["platform.name"]) for run in runs if "platform.name" in run.settings)
    names = ["cpu (stand-in for CUDA: memory saver and times of host memory)" if n == "cpu" else n for n in platforms]
    facts += [f"platform: {', '.join(names)}"] if names else []
    same: dict[str, list[str]] = {}
    for run in runs:
        if run.weights:
            same.setdefault(run.weights, []).append(run.name)
    equal = "; ".join(" = ".join(names) for names in same.values() if len(names) > 1)
    return (
        [*facts, f"equal bit for bit at the end (SHA-256 of weights and optimizer state): {equal}"] if equal else facts
    )


def _run_table(runs: Sequence[Run], groups: Sequence[Group]) -> Table:
    roles = _roles(runs)
    labels = {run.name: UNKNOWN for run in runs} | {run.name: g.label for g in groups for run in g.runs}
    rows = []
    for run in runs:
        seed = run.settings.get("seed")
        per = "/".join(text(run.bytes_per_parameter(role), ".1f") for role in roles)
        rows.append(
            (
                run.name,
                labels[run.name],
                UNKNOWN if seed is None else str(seed),
                run.state,
                text(_last(run.rewards), ".3f"),
                _accuracy(run, 0),
                _accuracy(run, max((step for step in run.accuracies if step > 0), default=-1)),
                text(run.step_seconds, ".3f"),
                per or UNKNOWN,
            )
        )
    title = "Runs: held-out accuracy before and after, with standard errors"
    title += f", host bytes per parameter asleep ({'/'.join(roles)})" if roles else ""
    header = ("run", "settings", "seed", "state", "reward", "before", "after", "s/step", "B/param")
    return Table(title=title, columns=header, rows=rows, text_columns=4)


def _accuracy(run: Run, step: int) -> str:
    error = run.accuracy_errors.get(step)
    return text(run.accuracies.get(step), ".1%") + ("" if error is None else f" ± {100 * error:.1f}")


def _owner_table(groups: Sequence[Group]) -> Table:
    unit, size = byte_unit(max((run.all_bytes or 0 for group in groups for run in group.runs), default=0))
    rows = []
    for members in alike(groups, ledger):
        group = members[0]
        for role in _roles(group.runs):
            owned = [group.median(lambda run, r=role, o=owner: run.kept(r, o)) for owner in OWNERS]
            total = group.median(lambda run, r=role: run.bytes_of(r)) or 0
            per = group.median(lambda run, r=role: run.bytes_per_parameter(r))
            cells = (*(f"{(x or 0) / size:.2f}" for x in owned), f"{total / size:.2f}", text(per, ".2f"))
            rows.append((joined_label(members), role, *cells))
    title = f"Who keeps what on the host while a role sleeps: {unit} of rank 0, median over seeds"
    return Table(title=title, columns=("settings", "role", *OWNERS, "all", "B/param"), rows=rows, text_columns=2)


def _settings_table(runs: Sequence[Run]) -> Table:
    rows = []
    for key in differing(runs):
        by_value: dict[str, list[str]] = {}
        for run in runs:
            if run.settings:
                by_value.setdefault(format_setting(run.settings.get(key)), []).append(run.name)
        rows.append((key, "; ".join(f"{value}: {', '.join(names)}" for value, names in by_value.items())))
    return Table(title="Settings that differ", columns=("setting", "value: runs"), rows=rows, text_columns=2)


def _note_table(runs: Sequence[Run]) -> Table:
    rows = [(run.name, run.state, run.note) for run in runs if run.note]
    return Table(title="Not finished, or not whole", columns=("run", "state", "why"), rows=rows, text_columns=3)


def csv_rows(runs: Sequence[Run]) -> list[list[Any]]:
    """The header and one line per run, with every digit; bytes and seconds are in the names, unknown is empty."""
    keys, roles = differing(runs), _roles(runs)
    choices = [key for key in telling_keys(runs) if key not in keys]
    header = ["run", "state", "note", *choices, *keys, "reward", "heldout_accuracy_before", "heldout_accuracy_after"]
    header += ["step_seconds", "sleep_seconds", "wake_seconds"]
    header += [f"{role}/bytes_per_parameter" for role in roles]
    header += [f"{role}/host_bytes/{owner}" for role in roles for owner in OWNERS]
    rows: list[list[Any]] = [header]
    for run in runs:
        after = _last({step: x for step, x in run.accuracies.items() if step > 0})
        row = [run.name, run.state, run.note, *(run.value(key) for key in (*choices, *keys))]
        row += [_last(run.rewards), run.accuracies.get(0), after, run.step_seconds, run.sleep_seconds, run.wake_seconds]
        row += [run.bytes_per_parameter(role) for role in roles]
        row += [run.kept(role, owner) for role in roles for owner in OWNERS]
        rows.append(row)
    return rows


def _roles(runs: Iterable[Run]) -> list[str]:
    return list(dict.fromkeys(role for run in runs for role in run.host_bytes))


def _last(values: Any) -> float | None:
    return values[max(values)] if values else None
