"""A job and its directory: whose it is, who may write there, and what the job ended with.

Simplification: the files are the only state. A directory is a job's as soon as its config lies there, which is the
first that a job writes. A job that is refused writes only into a directory that is nobody's.
"""

from __future__ import annotations

import fcntl
import json
import os
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hydra.experimental.callback import Callback

from trainer.checkpoint import folder as checkpoints
from trainer.checkpoint.preemption import STOP_FILE
from trainer.command import exits, same_job, sweep_notes, sweep_start
from trainer.command.same_job import describe, what_differs
from trainer.common.files import UnwritableFile, naming, write_whole
from trainer.common.json_files import OBJECT, TEXT, optional
from trainer.common.terminal import tell
from trainer.config.identity import to_plain
from trainer.config.schema import Config
from trainer.report import MEMORY_FILE, METRICS_FILE, REPORT_FILE
from trainer.report.compare import HYDRA_FOLDER
from trainer.report.document import MEMORY_FIGURE, TRAINING_FIGURE
from trainer.report.records import CONFIG_FILE, RESULT_FILE, read_config, read_result
from trainer.worker import EXPORT_FOLDER

if TYPE_CHECKING:
    from omegaconf import DictConfig

FAILURE_FILE = "failure.txt"  # why the job has not finished: one line, then where to read more
LOCK_FILE = ".lock"
OUTPUT_FILE = "output.log"  # what a job wrote that had no terminal of its own
# What a job overwrites or removes where it finds it, beside what :func:`checkpoints.not_of_a_run` knows.
_OWN_NAMES = (
    RESULT_FILE,
    METRICS_FILE,
    MEMORY_FILE,
    REPORT_FILE,
    MEMORY_FIGURE,
    TRAINING_FIGURE,
    EXPORT_FOLDER,
    STOP_FILE,
)
_OWN_LOGS = ("logs/rank_*", "logs/elastic_*")
_COMPARED = {"launch": OBJECT, "resume": optional(TEXT)}


class SweepDirectory(Callback):
    """Hydra callback. Remembers where this process's sweep puts its jobs; None before a sweep, and in single runs.
    Refuses what Hydra would do in silence, or before a job can look.

    Hydra's ``on_multirun_end`` could not show the table: it is not called when a job failed.
    """

    path: Path | None = None

    def on_run_start(self, config: DictConfig, **kwargs: Any) -> None:
        def prepare() -> None:
            sweep_start.refuse_other_record(config)
            sweep_start.require_folder("hydra.run.dir", config.hydra.run.dir)

        _refusing(prepare)

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        sweep = Path(config.hydra.sweep.dir).absolute()

        def prepare() -> None:
            if (sweep / CONFIG_FILE).exists():
                raise ValueError(f"hydra.sweep.dir={sweep} is the folder of a single run: choose another")
            sweep_start.end_in_one_line()
            sweep_start.refuse_other_record(config)
            sweep_start.refuse_choices_of_jobs(config)
            sweep_start.number_trials(config)
            sweep_start.require_folder("hydra.sweep.dir", config.hydra.sweep.dir)
            (sweep / STOP_FILE).unlink(missing_ok=True)
            sweep_notes.clear(sweep)

        _refusing(prepare)
        SweepDirectory.path = sweep


def _refusing(check: Callable[[], None]) -> None:
    """End the command where ``check`` raises ValueError; of another exception in a callback Hydra makes a warning."""
    try:
        check()
    except ValueError as error:
        tell(f"error: {error}")
        raise exits.Said(exits.REFUSED) from error


def as_begun(config: Config, directory: Path, *, left_open: Collection[str]) -> Config:
    """``config`` as the job in ``directory`` was begun with it: see :func:`trainer.command.same_job.as_begun`."""
    if not (directory / CONFIG_FILE).exists():
        return config
    return same_job.as_begun(config, read_config(directory, fields=_COMPARED), left_open=left_open)


def finished(directory: Path, config: Config) -> dict[str, Any] | None:
    """The result of this config's job if it has finished in ``directory``.

    Raises:
        ValueError: the directory belongs to a job of another config, or its config.json to something else, or a file
            of the job's is damaged.
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
    return read_result(directory)


def require_room(directory: Path) -> None:
    """Raise ValueError if ``directory``, which is no job's yet, holds files that a job would overwrite or remove."""
    if (directory / CONFIG_FILE).exists():
        return
    found = [name for name in _OWN_NAMES if (directory / name).exists()]
    found += sorted(str(path.relative_to(directory)) for pattern in _OWN_LOGS for path in directory.glob(pattern))
    found += [f"{checkpoints.FOLDER}/{name}" for name in checkpoints.not_of_a_run(directory / checkpoints.FOLDER)]
    if (directory / HYDRA_FOLDER).exists() != (directory / FAILURE_FILE).exists():  # both are there after a refusal
        found += [name for name in (HYDRA_FOLDER, FAILURE_FILE) if (directory / name).exists()]
    if found:
        more = f" and {len(found) - 3} more" if len(found) > 3 else ""
        raise ValueError(
            f"{directory} holds {', '.join(found[:3])}{more} but no {CONFIG_FILE} of a run: a run would overwrite or "
            "remove that. Choose another hydra.run.dir (in a sweep hydra.sweep.dir), or move it away"
        )


@contextmanager
def held(directory: Path) -> Iterator[None]:
    """Run the job in ``directory`` in no other process meanwhile; the system lets go of it when this process ends.

    Raises:
        ValueError: another process runs it, perhaps of a sweep whose launching process has been killed.
    """
    with naming(directory / LOCK_FILE):
        directory.mkdir(parents=True, exist_ok=True)
        file = (directory / LOCK_FILE).open("a")  # "w" would change it, whoever has it
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ValueError(f"the job in {directory} is running in another process: wait for it, or end it") from error
        yield


def claim(
    directory: Path, config: Config, checkpoint: Path | None, *, hydra_record: Mapping[str, str] | None = None
) -> None:
    """Make ``directory`` the place of this config's job, which goes on from ``checkpoint`` or starts anew.

    The record files begin with those of the run that goes on. Without a checkpoint they are new: what a job left behind
    when it was cut off is removed. ``hydra_record``: name -> text of the files in which Hydra says what it composed.

    Raises:
        UnwritableFile: e.g. because the disk is full.
    """
    directory.mkdir(parents=True, exist_ok=True)
    if not (directory / CONFIG_FILE).exists():
        write_whole(directory / CONFIG_FILE, json.dumps(to_plain(config), indent=2) + "\n")
    (directory / FAILURE_FILE).unlink(missing_ok=True)
    if hydra_record is not None:
        _write_hydra_record(directory, hydra_record)
    checkpoints.remove_leftovers(directory / checkpoints.FOLDER)
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


def note_refusal(directory: Path, message: str, hydra_record: Mapping[str, str]) -> None:
    """Note what was refused and why in ``directory``, if that is nobody's: no job's, none that is about to begin, and
    without files of somebody else."""
    with suppress(ValueError, UnwritableFile):
        require_room(directory)
        if not (directory / CONFIG_FILE).exists():
            with held(directory):
                write_failure(directory, message)
                _write_hydra_record(directory, hydra_record)


def _write_hydra_record(directory: Path, record: Mapping[str, str]) -> None:
    (directory / HYDRA_FOLDER).mkdir(exist_ok=True)
    for name, text in record.items():
        write_whole(directory / HYDRA_FOLDER / name, text)


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
    """ "finished", "failed" (a note says why), "refused" (as well: it has not begun), "damaged" (its result) or "cut
    off": killed, or still running."""
    result, damage = result_of(directory)
    if damage is None and result is None and (directory / FAILURE_FILE).exists():
        return "failed" if (directory / CONFIG_FILE).exists() else "refused"
    return "damaged" if damage is not None else "cut off" if result is None else "finished"


def result_of(directory: Path) -> tuple[dict[str, float] | None, str | None]:
    """(the result, what is wrong with its file)."""
    try:
        return read_result(directory), None
    except ValueError as error:
        return None, str(error)
