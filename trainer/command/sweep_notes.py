"""What became of a sweep's jobs that did not finish: noted in the sweep's own folder, where every launcher's processes
can write, since a refused job must not write into a folder that belongs to another one."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from trainer.common.json_files import TEXT, list_of, parse_json, whole

NOTES_FILE = "unfinished.jsonl"  # one line for each, of the last command with this sweep directory

_FIELDS = {"job": TEXT, "overrides": list_of(TEXT), "message": TEXT, "code": whole(1)}


@dataclass(frozen=True)
class Note:
    """A job that did not finish: its folder below the sweep's, what was asked of it, why not, and the exit code that
    this would be for the job alone (:mod:`trainer.command.exits`)."""

    job: str
    overrides: Sequence[str]
    message: str
    code: int


def clear(sweep: Path) -> None:
    (sweep / NOTES_FILE).unlink(missing_ok=True)


def add(sweep: Path, note: Note) -> None:
    """Append a note, unless the disk is full. One write: jobs side by side do not mix."""
    line = (json.dumps(asdict(note)) + "\n").encode()
    with suppress(OSError):
        sweep.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(sweep / NOTES_FILE, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            os.write(descriptor, line)
        finally:
            os.close(descriptor)


def read(sweep: Path) -> Mapping[str, Note]:
    """Job -> its last note. A line that a full disk has cut off is left out."""
    path, notes = sweep / NOTES_FILE, {}
    for line in path.read_bytes().splitlines() if path.exists() else ():
        with suppress(ValueError):
            found = parse_json(line, where=str(path), advice="remove the line", fields=_FIELDS)
            notes[found["job"]] = Note(**{name: found[name] for name in _FIELDS})
    return notes
