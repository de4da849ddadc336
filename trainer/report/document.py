"""The run report: report.md with the tables, memory.png and training.png beside it."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from trainer.common.files import UnwritableFile, write_whole
from trainer.common.units import format_setting, leaves
from trainer.report.records import MEMORY_FILE, METRICS_FILE, Record, read_records
from trainer.report.schedule import draw_schedule, moves_table, schedule_table
from trainer.report.tables import final_tables, plan_table

REPORT_FILE = "report.md"
TRAINING_FIGURE = "training.png"
MEMORY_FIGURE = "memory.png"
SCHEDULE_FIGURE = "schedule.png"


def write_report(
    directory: Path,
    *,
    config: Mapping[str, Any],
    summary: Mapping[str, Any],
    plan: Sequence[Record] = (),
    schedule: Sequence[Record] = (),
    moving_seconds: Mapping[str, float] | None = None,
) -> Path:
    """Write the report of a run from its record files, whole or broken off; call it again at any time.

    Args:
        directory: the run directory, with metrics.jsonl and memory.jsonl.
        config: the run's config as plain nested values; listed as dotted `key=value` lines.
        summary: what a reader should know first (platform, ranks, patches, ...), as name -> value.
        plan: rows for `plan_table`.
        schedule: rows for `schedule_table`, of `offload=auto`; `moving_seconds`: those that it predicts.

    Returns:
        The path of report.md.

    Raises:
        FileNotFoundError: the directory holds no record files.
        UnwritableFile: e.g. because the disk is full.
    """
    metrics, memory = read_records(directory / METRICS_FILE), read_records(directory / MEMORY_FILE)
    facts = "\n".join(f"- {name}: {value}" for name, value in summary.items())
    parts = [f"# {directory.resolve().name}", facts]
    parts += _figures(metrics, memory, directory, schedule)
    planned = (
        [schedule_table(schedule), moves_table(schedule, seconds=moving_seconds, metrics=metrics)] if schedule else []
    )
    tables = [*([plan_table(plan)] if plan else []), *planned, *final_tables(metrics, memory, plan=plan)]
    parts += [f"## {table.title}\n\n{table.markdown()}" for table in tables]
    settings = [f"{key}={format_setting(value)}" for key, value in leaves(config)]
    parts.append("\n".join(["## Config", "", "```", *settings, "```"]))
    path = directory / REPORT_FILE
    write_whole(path, "\n\n".join(part for part in parts if part) + "\n")
    return path


def _figures(
    metrics: Sequence[Record], memory: Sequence[Record], directory: Path, schedule: Sequence[Record]
) -> list[str]:
    """The figures, as parts of the document; where matplotlib fails, why, since the numbers are whole without."""
    parts = []
    try:
        from trainer.report import figures  # matplotlib waits until a report is written

        if figures.draw_training(metrics, directory / TRAINING_FIGURE):
            parts += [
                "## Training",
                f"![Reward, held-out accuracy, KL, explained variance, entropy]({TRAINING_FIGURE})",
            ]
        if figures.draw_memory(memory, directory / MEMORY_FIGURE):
            parts += ["## Memory", f"![Host, asleep and GPU memory over time]({MEMORY_FIGURE})"]
        if schedule:
            draw_schedule(schedule, directory / SCHEDULE_FIGURE)
            parts += ["## Schedule", f"![What sleeps in which phase]({SCHEDULE_FIGURE})"]
    except UnwritableFile:
        raise
    except Exception as error:
        parts.append(f"No more figures: {type(error).__name__}: {error}")
    return parts
