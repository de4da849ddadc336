"""The end of a sweep: what became of each job, and where to read more."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from trainer.command import exits, jobs, sweep_notes
from trainer.report import Table
from trainer.report.compare import find_runs, natural_order, read_overrides
from trainer.report.tables import accuracy_text


@dataclass(frozen=True)
class Outcome:
    """One job of a sweep.

    Attributes:
        job: its folder below the sweep's.
        overrides: of the command line, as this job had them.
        state: see :func:`jobs.state_of`; what the last command met counts more than what lies in the folder.
        accuracy: on held-out questions, of a finished job.
        reason: why it has not finished, in one line.
        log: where to read more, if anywhere.
    """

    job: str
    overrides: list[str]
    state: str
    accuracy: str = "-"
    reason: str = ""
    log: str | None = None


def outcomes(sweep: Path) -> list[Outcome]:
    """Of every job that was started or refused under the sweep's directory, in the order of their folders."""
    notes = sweep_notes.read(sweep)
    folders = {str(path.relative_to(sweep)): path for path in find_runs(sweep)}
    found = {job: _from_folder(job, path) for job, path in folders.items()}
    for job, note in notes.items():
        state = "refused" if note.code == exits.REFUSED else "failed"
        own = found.get(job)
        log = _log_of(note.message) or (own.log if own is not None and own.state == state else None)
        found[job] = Outcome(job, list(note.overrides), state, reason=note.message.splitlines()[0], log=log)
    return [found[job] for job in sorted(found, key=natural_order)]


def _from_folder(job: str, path: Path) -> Outcome:
    overrides, state = read_overrides(path), jobs.state_of(path)
    result, damage = jobs.result_of(path)
    if result is not None:
        return Outcome(job, overrides, state, accuracy_text(result))
    note, output = path / jobs.FAILURE_FILE, path / jobs.OUTPUT_FILE
    text = damage or (note.read_text(errors="replace").strip() if note.exists() else "")
    text = text or "killed, or still running: no result and no error"
    log = output if output.exists() else note if note.exists() else path / "logs"
    return Outcome(job, overrides, state, reason=text.splitlines()[0], log=_log_of(text) or str(log))


def _log_of(message: str) -> str | None:
    named = re.search(r"^  (?:traceback|log): (.+)$", message, re.MULTILINE)
    return named.group(1) if named else None


def table_of(sweep: Path, jobs_of_it: list[Outcome]) -> Table:
    """One row per job, with the overrides that not all of them have."""
    shared = set.intersection(*(set(job.overrides) for job in jobs_of_it)) if len(jobs_of_it) > 1 else set()
    rows = []
    for job in jobs_of_it:
        own = " ".join(override for override in job.overrides if override not in shared)
        rows.append((job.job, own, job.state, job.accuracy))
    columns = ("job", "overrides", "state", "held-out accuracy")
    return Table(title=f"Sweep in {sweep}", columns=columns, rows=rows, text_columns=3)


def failure_lines(jobs_of_it: list[Outcome]) -> list[str]:
    """Of every job that has not finished: the first line of its error, and where to read more."""
    lines = []
    for job in jobs_of_it:
        if job.state != "finished":
            lines.append(f"job {job.job} {job.state}: {job.reason}")
            lines += [f"  log: {job.log}"] if job.log else []
    return lines


def exit_code(jobs_of_it: list[Outcome]) -> int:
    """0 if all have finished, 1 if one failed or was cut off, 2 if those that have not finished were refused."""
    states = {job.state for job in jobs_of_it} - {"finished"}
    return 0 if not states else exits.REFUSED if states == {"refused"} else exits.FAILED
