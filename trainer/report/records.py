"""The run's two record files: flat JSON objects, one a line, flushed line by line. Only rank 0 writes them.

`metrics.jsonl` holds one record at the end of the supervised warm-up (step 0) and one per PPO step:
    step, reward, kl, entropy, {actor,critic}/{loss,grad_norm,clip_fraction}, critic/explained_variance,
    response_length, truncated_fraction, seconds/<phase>, host_rss_bytes, asleep_{released,backup}_bytes,
    moved_to_{host,device}_bytes, moving_seconds (of calls that put regions to sleep or wake them up),
    tokens_per_second/{<phase>,step}, tokens_per_second_per_rank/step and, where the device's peak is known,
    mfu/{<phase>,step} (trainer/measure/throughput.py); nothing of a critic where there is none;
    step 0 also parameters/<role> (how many parameters the bytes of memory.jsonl belong to);
    the first, the last and those that algo.evaluate_every or checkpoint.keep_best asks for also heldout_accuracy;
    the last weights_sha256/<role>.
`memory.jsonl` holds, in the order in which things happened, one record per region and sleep or wake-up
    step, phase, role, kind, flag, keeper, state ("asleep" | "awake"), released_bytes, backup_bytes, seconds,
    to_host_bytes, to_device_bytes (of a role: what it has copied since its last record)
and one at the end of every phase
    step, phase, time_seconds (wall clock), rss_bytes, pss_bytes, gpu_allocated_bytes, gpu_used_bytes,
(pss_bytes null in most of them: it is slow to ask for)
and for the ledger one of all that process and device hold at two moments, before anything was built and at the end
    step, phase, moment ("baseline" | "asleep"), {rss,pss,pss_untrimmed,host_used,gpu_{used,reserved,allocated}}_bytes.
Bytes of a region are those of its whole segments; seconds are those until the call returned: what a side stream still
copies then is in the time of its phase. state "restored": the parameters, once mapped, hold a tag's weights again.
What JSON cannot say (NaN, infinities) and what is not known is null; floats keep every digit.
"""

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self, TextIO

from trainer.common.files import UnwritableFile, naming, write_whole
from trainer.common.json_files import NUMBER, Kind, optional, parse_json, read_json, whole

Record = Mapping[str, Any]

CONFIG_FILE = "config.json"
RESULT_FILE = "result.json"
BENCH_FILE = "bench.jsonl"  # of ``trainer.bench``, whose directories are no runs
METRICS_FILE = "metrics.jsonl"
MEMORY_FILE = "memory.jsonl"
_FIELDS = {"step": whole(0)}
_RESULT_FIELDS = {"heldout_accuracy": NUMBER, "host_bytes": optional(NUMBER)}
_ANOTHER = "choose another hydra.run.dir (in a sweep hydra.sweep.dir)"


def read_records(path: Path, *, fields: Mapping[str, Kind] = _FIELDS) -> list[Record]:
    """All whole lines of a record file; a line that a killed run left unfinished is not one of them.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: a line is no JSON object, or lacks one of the ``fields``; names file and line.
    """
    return [
        parse_json(line, where=f"{path}, line {number}", advice="mend or remove the line", fields=fields)
        for number, line in enumerate(path.read_bytes().split(b"\n")[:-1], start=1)
    ]


def read_config(directory: Path, *, fields: Mapping[str, Kind] | None = None) -> dict[str, Any]:
    """Every resolved value of the run in ``directory``, as nested dicts. Raises as :func:`read_json` does."""
    return read_json(directory / CONFIG_FILE, advice=_ANOTHER, fields=fields)


def read_result(directory: Path) -> dict[str, float] | None:
    """The objectives of the finished run in ``directory``; None if it has not finished.

    Raises:
        ValueError: the file is damaged.
    """
    path = directory / RESULT_FILE
    advice = f"remove it, and the same command goes on from the newest checkpoint; or {_ANOTHER}"
    return read_json(path, advice=advice, fields=_RESULT_FIELDS) if path.exists() else None


class RunRecords:
    """Appends to the record files of a run directory, which is made where missing.

    A step's record is on disk, with all before it, when :meth:`metrics` returns: no checkpoint is ahead of the records,
    whatever happens to the machine.

    A run that goes on from a checkpoint gives `resumed_after`, the last step in that checkpoint. Records of
    later steps, which the interrupted run had still written, are dropped: the files read like those of an
    unbroken run. A step is recorded before its checkpoint is saved.

    Raises:
        UnwritableFile: by every method, e.g. because the disk is full, or because somebody deleted the file.
    """

    def __init__(self, directory: Path, *, resumed_after: int | None = None) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        for name in (METRICS_FILE, MEMORY_FILE):
            _mend(directory / name, resumed_after=resumed_after)
        self._metrics = _open(directory / METRICS_FILE)
        self._memory = _open(directory / MEMORY_FILE)

    def metrics(self, record: Record) -> None:
        _append(self._metrics, record)
        for file in (self._metrics, self._memory):
            with naming(Path(file.name)):
                os.fsync(file.fileno())

    def memory(self, record: Record) -> None:
        _append(self._memory, record)

    def close(self) -> None:
        for file in (self._metrics, self._memory):
            with naming(Path(file.name)):  # it tries once more to write what it could not
                file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def _mend(path: Path, *, resumed_after: int | None) -> None:
    """Drop an unfinished last line and the steps after `resumed_after`; the file is never half written."""
    if not path.exists():
        return
    kept = [r for r in read_records(path) if resumed_after is None or r["step"] <= resumed_after]
    write_whole(path, "".join(map(_line, kept)))


def _open(path: Path) -> TextIO:
    with naming(path):
        return path.open("a")


def _append(file: TextIO, record: Record) -> None:
    line, path = _line(record), Path(file.name)
    with naming(path):
        file.write(line)
        file.flush()
        if path.exists() and os.path.samestat(path.stat(), os.fstat(file.fileno())):
            return
    raise UnwritableFile(f"cannot write {path}: it was deleted or replaced while the run wrote to it")


def _line(record: Record) -> str:
    assert "step" in record, f"a record without its step: {record}"
    return json.dumps({key: _plain(key, value) for key, value in record.items()}, allow_nan=False) + "\n"


def _plain(key: str, value: Any) -> str | int | float | bool | None:
    if hasattr(value, "item"):  # a NumPy or torch scalar
        value = value.item()
    assert value is None or isinstance(value, str | int | float), f"records are flat, but {key} is {value!r}"
    return None if isinstance(value, float) and not math.isfinite(value) else value
