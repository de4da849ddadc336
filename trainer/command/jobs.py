"""A job and its directory: whose it is, what it ended with, and the table of all jobs of a sweep.

Simplification: the files are the only state. A sweep that runs again in the same directory (``hydra.sweep.dir=...``)
skips what has finished and does the rest.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import sys
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hydra.experimental.callback import Callback

from trainer.checkpoint import folder as checkpoints
from trainer.command import same_job
from trainer.command.same_job import describe, what_differs
from trainer.common.files import UnwritableFile, write_whole
from trainer.common.json_files import OBJECT, TEXT, optional
from trainer.config.identity import to_plain
from trainer.config.schema import Config
from trainer.report import MEMORY_FILE, METRICS_FILE, Table
from trainer.report.compare import find_runs, read_overrides
from trainer.report.records import CONFIG_FILE, RESULT_FILE, read_config, read_result
from trainer.report.tables import accuracy_text

if TYPE_CHECKING:
    from omegaconf import DictConfig

FAILURE_FILE = "failure.txt"  # why the job has not finished: one line, then where to read more
LOCK_FILE = ".lock"
OUTPUT_FILE = "output.log"  # what a job wrote that had no terminal of its own
_COMPARED = {"launch": OBJECT, "resume": optional(TEXT)}


class SweepDirectory(Callback):
    """Hydra callback. Remembers where this process's sweep puts its jobs; None before a sweep, and in single runs.

    Hydra's ``on_multirun_end`` could not show the table: it is not called when a job failed.
    """

    path: Path | None = None

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        SweepDirectory.path = Path(config.hydra.sweep.dir).absolute()


def as_begun(config: Config, directory: Path, *, left_open: Collection[str]) -> Config:
    """``config`` as the job in ``directory`` was begun with it: see :func:`trainer.command.same_job.as_begun`."""
    if not (directory / CONFIG_FILE).exists():
        return config
    return same_job.as_begun(config, read_config(directory, fields=_COMPARED), left_open=left_open)


def finished(directory: Path, config: Config) -> dict[str, Any] | None:
    """The result of this config's job if it has finished in ``directory``.

    Raises:
        ValueError: the directory belongs to a job of another config.
    """
    path = directory / CONFIG_FILE
    if not path.exists():
        return None
    different = what_differs(read_config(directory, fields=_COMPARED), config, directory)
    if different:
        raise ValueError(
            f"{directory} holds a run of another config, which this one would overwrite: choose another "
            "hydra.run.dir (in a sweep hydra.sweep.dir), or go on with that run by giving what it has "
            f"({describe(different)})"
        )
    (directory / FAILURE_FILE).unlink(missing_ok=True)
    return read_result(directory)


@contextmanager
def held(directory: Path) -> Iterator[None]:
    """Run the job in ``directory`` in no other process meanwhile; the system lets go of it when this process ends.

    Raises:
        ValueError: another process runs it, perhaps of a sweep whose launching process has been killed.
    """
    directory.mkdir(parents=True, exist_ok=True)
    with (directory / LOCK_FILE).open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ValueError(f"the job in {directory} is running in another process: wait for it, or end it") from error
        yield


def claim(directory: Path, config: Config, checkpoint: Path | None) -> None:
    """Make ``directory`` the place of this config's job, which goes on from ``checkpoint`` or starts anew.

    The record files begin with those of the run that goes on. Without a checkpoint they are new: what a job left behind
    when it was cut off is removed.

    Raises:
        UnwritableFile: e.g. because the disk is full.
    """
    directory.mkdir(parents=True, exist_ok=True)
    (directory / FAILURE_FILE).unlink(missing_ok=True)
    if not (directory / CONFIG_FILE).exists():
        write_whole(directory / CONFIG_FILE, json.dumps(to_plain(config), indent=2) + "\n")
    source = None if checkpoint is None else checkpoints.run_directory_of(checkpoint)
    for name in (METRICS_FILE, MEMORY_FILE):
        if checkpoint is None:
            (directory / name).unlink(missing_ok=True)
        elif source is not None and not (directory / name).exists() and (source / name).exists():
            write_whole(directory / name, (source / name).read_bytes())


def write_result(directory: Path, result: dict[str, Any]) -> None:
    """Mark the job as finished. ``result``: plain values."""
    write_whole(directory / RESULT_FILE, json.dumps(result, indent=2) + "\n")


def write_failure(directory: Path, message: str) -> None:
    """Note why the job has not finished, unless the disk is full; its next start removes the note."""
    if directory.is_dir():
        with suppress(UnwritableFile):
            write_whole(directory / FAILURE_FILE, f"{message}\n")


@contextmanager
def own_output(directory: Path) -> Iterator[None]:
    """Send what this process and its children write to the job's own file; the terminal gets a line at both ends."""
    path = directory / OUTPUT_FILE
    directory.mkdir(parents=True, exist_ok=True)
    print(f"job {directory.name} writes to {path}", flush=True)
    kept = [os.dup(1), os.dup(2)]
    with path.open("a") as file:
        sys.stderr.flush()
        for number in (1, 2):
            os.dup2(file.fileno(), number)
    try:
        yield
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        for number, descriptor in zip((1, 2), kept, strict=True):
            os.dup2(descriptor, number)
            os.close(descriptor)
        print(f"job {directory.name} {state_of(directory)}", flush=True)


def state_of(directory: Path) -> str:
    """ "finished", "failed" (a note says why), "damaged" (its result) or "cut off": killed, or still running."""
    if (directory / FAILURE_FILE).exists():
        return "failed"
    result, damage = _result_of(directory)
    return "damaged" if damage is not None else "cut off" if result is None else "finished"


def _result_of(directory: Path) -> tuple[dict[str, float] | None, str | None]:
    """(the result, what is wrong with its file)."""
    try:
        return read_result(directory), None
    except ValueError as error:
        return None, str(error)


def sweep_table(directory: Path) -> Table:
    """One row per job that was started under the sweep's directory, with the overrides that not all of them have."""
    jobs = find_runs(directory)
    overrides = {job: read_overrides(job) for job in jobs}
    shared = set.intersection(*map(set, overrides.values())) if len(jobs) > 1 else set()
    rows = []
    for job in jobs:
        own = " ".join(override for override in overrides[job] if override not in shared)
        result, _ = _result_of(job)
        accuracy = "-" if result is None else accuracy_text(result)
        rows.append((str(job.relative_to(directory)), own, state_of(job), accuracy))
    columns = ("job", "overrides", "state", "held-out accuracy")
    return Table(title=f"Sweep in {directory}", columns=columns, rows=rows, text_columns=3)


def failure_lines(directory: Path) -> list[str]:
    """Of every job of the sweep that has not finished: the first line of its error, and where to read more."""
    lines = []
    for job in find_runs(directory):
        if state_of(job) == "finished":
            continue
        note, (_, damage) = job / FAILURE_FILE, _result_of(job)
        text = note.read_text(errors="replace").strip() if note.exists() else ""
        text = text or damage or "killed, or still running: no result and no error"
        named = re.search(r"^  (?:traceback|log): (.+)$", text, re.MULTILINE)
        output = job / OUTPUT_FILE
        log = named.group(1) if named else str(output if output.exists() else note if note.exists() else job / "logs")
        lines += [f"job {job.relative_to(directory)} {state_of(job)}: {text.splitlines()[0]}", f"  log: {log}"]
    return lines
