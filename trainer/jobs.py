"""A job and its directory: whose it is, what it ended with, and the table of all jobs of a sweep.

Simplification: the files are the only state. A sweep that runs again in the same directory (``hydra.sweep.dir=...``)
skips what has finished and does the rest.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hydra.experimental.callback import Callback

from trainer.config import Config, to_plain
from trainer.report import MEMORY_FILE, METRICS_FILE, Table
from trainer.report.compare import find_runs, read_overrides
from trainer.report.records import CONFIG_FILE, RESULT_FILE

if TYPE_CHECKING:
    from omegaconf import DictConfig


class SweepDirectory(Callback):
    """Hydra callback. Remembers where this process's sweep puts its jobs; None before a sweep, and in single runs.

    Hydra's ``on_multirun_end`` could not show the table: it is not called when a job failed.
    """

    path: Path | None = None

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        SweepDirectory.path = Path(config.hydra.sweep.dir).absolute()


def claim(directory: Path, config: Config) -> dict[str, Any] | None:
    """Make ``directory`` the place of this config's job; the result if that job has already finished there.

    What a job of the same config left behind when it was cut off is removed: it starts over.

    Raises:
        ValueError: the directory belongs to a job of another config.
    """
    text = json.dumps(to_plain(config), indent=2) + "\n"
    path = directory / CONFIG_FILE
    if path.exists():
        if path.read_text() != text:
            raise ValueError(
                f"{directory} holds a run of another config, which this one would overwrite: choose another "
                "hydra.run.dir (in a sweep hydra.sweep.dir)"
            )
        result = read_result(directory)
        if result is not None:
            return result
        for name in (METRICS_FILE, MEMORY_FILE):
            (directory / name).unlink(missing_ok=True)
    directory.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return None


def write_result(directory: Path, result: dict[str, Any]) -> None:
    """Mark the job as finished. ``result``: the worker's last record, plain values."""
    (directory / RESULT_FILE).write_text(json.dumps(result, indent=2) + "\n")


def read_result(directory: Path) -> dict[str, Any] | None:
    """The result of a finished job; None if there is none."""
    path = directory / RESULT_FILE
    return json.loads(path.read_text()) if path.exists() else None


def sweep_table(directory: Path) -> Table:
    """One row per job that was started under the sweep's directory, with the overrides that not all of them have."""
    jobs = find_runs(directory)
    overrides = {job: read_overrides(job) for job in jobs}
    shared = set.intersection(*map(set, overrides.values())) if len(jobs) > 1 else set()
    rows = []
    for job in jobs:
        result = read_result(job)
        own = " ".join(override for override in overrides[job] if override not in shared)
        accuracy = "-" if result is None else f"{result['heldout_accuracy']:.2%}"
        rows.append((str(job.relative_to(directory)), own, "failed" if result is None else "finished", accuracy))
    columns = ("job", "overrides", "state", "held-out accuracy")
    return Table(title=f"Sweep in {directory}", columns=columns, rows=rows, text_columns=3)
