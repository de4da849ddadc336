"""The manifest of a checkpoint: where the run stood, and by what every other file of the folder is known again."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path, PurePosixPath
from typing import Any

from trainer.common.files import write_whole
from trainer.common.json_files import (
    COPY_AGAIN,
    NUMBER,
    OBJECT,
    TEXT,
    Kind,
    field_faults,
    list_of,
    object_of,
    optional,
    read_json,
    whole,
)

MANIFEST_FILE = "manifest.json"
DESCRIPTION_FILE = ".metadata"  # of a role's folder, in which torch.distributed.checkpoint says what lies where
_OWN_DIGEST = "sha256"  # the manifest's own
_AT_ONCE = 8  # files whose checksums are computed at the same time, at most
_BY_CHECKSUM = ": its SHA-256 is another (checkpoint.checksums=false does not look)"


@dataclass(frozen=True)
class SavedFile:
    """A file as it was written.

    Attributes:
        sha256: hex digits; None: not computed (``checkpoint.checksums=false``).
    """

    size_bytes: int
    sha256: str | None


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """Where a run stands after PPO step ``step``, roles left out.

    Attributes:
        kl_coef: of the next step.
        schedule_steps: role -> optimizer steps that its learning-rate schedule has counted (skipped ones too).
        optimizer_steps: role -> the count in Adam's bias correction (skipped ones not).
        tags: role -> tags of its weights backuper beside the role's own.
        record: the step's record of metrics.jsonl.
        config: every resolved setting of the run that saved.
        questions: digest of the examples that it asked (:func:`trainer.data.selection.digest_of`).
        files: name (with its folder, if any) -> every other file in the checkpoint.
    """

    step: int
    kl_coef: float
    schedule_steps: Mapping[str, int]
    optimizer_steps: Mapping[str, int]
    tags: Mapping[str, Sequence[str]]
    record: Mapping[str, Any]
    config: Mapping[str, Any]
    questions: str
    files: Mapping[str, SavedFile]


_OF_A_RECORD = Kind(
    "a finite number, text or null", lambda x: x is None or isinstance(x, str | bool) or NUMBER.accepts(x)
)
_FIELDS = {
    "step": whole(0),
    "kl_coef": Kind("a finite number of at least 0", lambda value: NUMBER.accepts(value) and value >= 0),
    "schedule_steps": object_of(whole(0)),
    "optimizer_steps": object_of(whole(0)),
    "tags": object_of(list_of(TEXT)),
    "record": object_of(_OF_A_RECORD),
    "config": OBJECT,
    "questions": TEXT,
    "files": object_of(OBJECT),
    _OWN_DIGEST: TEXT,
}
_FILE_FIELDS = {"size_bytes": whole(0), "sha256": optional(TEXT)}


def write_manifest(checkpoint: Path, manifest: Manifest) -> None:
    """Write the last file of a checkpoint, on disk when this returns."""
    record = {key: value if _OF_A_RECORD.accepts(value) else None for key, value in manifest.record.items()}
    values = asdict(replace(manifest, record=record))  # as metrics.jsonl has it
    text = json.dumps(values | {_OWN_DIGEST: _digest_of(values)}, indent=2)
    write_whole(checkpoint / MANIFEST_FILE, f"{text}\n")


def read_manifest(checkpoint: Path) -> Manifest:
    """The manifest by itself; whether the files are as it says is :func:`fault_in`'s.

    Raises:
        FileNotFoundError: there is none.
        ValueError: it is damaged; names the file, the field and what was found.
    """
    return _manifest_of(_read(checkpoint))


def fault_in(checkpoint: Path, *, checksums: bool = False) -> str | None:
    """What is wrong with a checkpoint, manifest included; None if all files are there in full length.

    Args:
        checksums: their SHA-256, and the manifest's, must be those that were saved too, where they were.
    """
    try:
        values = _read(checkpoint)
        manifest = _manifest_of(values)
    except FileNotFoundError:
        return f"{MANIFEST_FILE} is missing"
    except ValueError as error:
        return str(error).removeprefix(f"{checkpoint}/").removesuffix(f": {COPY_AGAIN}")
    for name, saved in manifest.files.items():
        path = checkpoint / name
        if not path.is_file():
            return f"{name} is missing"
        if path.stat().st_size != saved.size_bytes:
            return f"{name} has {path.stat().st_size} bytes instead of {saved.size_bytes}"
    return next(_changed(checkpoint, manifest, values[_OWN_DIGEST]), None) if checksums else None


def _read(checkpoint: Path) -> dict[str, Any]:
    return read_json(checkpoint / MANIFEST_FILE, advice=COPY_AGAIN, fields=_FIELDS)


def _manifest_of(values: Mapping[str, Any]) -> Manifest:
    """Raises ValueError where the fields do not go together."""
    problem = next(_faults(values), None)
    if problem is not None:
        raise ValueError(f"{MANIFEST_FILE} {problem}")
    files = {name: SavedFile(**saved) for name, saved in values["files"].items()}
    others = {key: value for key, value in values.items() if key not in ("files", _OWN_DIGEST)}
    return Manifest(**others, files=files)


def _faults(values: Mapping[str, Any]) -> Iterator[str]:
    known = {field.name for field in fields(Manifest)} | {_OWN_DIGEST}
    for name in values.keys() - known:
        yield f"has the field {name}, which is of another version"
    for name, saved in values["files"].items():
        yield from field_faults(saved, _FILE_FIELDS, f"files.{name}.")
        if saved.keys() - _FILE_FIELDS.keys() or PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts:
            yield f"has files.{name}, which is no file of a checkpoint"
    for role in values["optimizer_steps"]:
        if f"{role}/{DESCRIPTION_FILE}" not in values["files"]:
            yield f"has no {role}/{DESCRIPTION_FILE} among its files, though it has optimizer_steps of the {role}"
        if role not in values["tags"]:
            yield f"has no tags.{role}, though it has optimizer_steps of the {role}"
    if values["record"].get("step", values["step"]) != values["step"]:
        yield f"has step={values['step']}, but the record is of step {values['record']['step']}"


def _changed(checkpoint: Path, manifest: Manifest, digest: str) -> Iterator[str]:
    """What is not as it was saved, though its length is."""
    if _digest_of(asdict(manifest)) != digest:
        yield f"{MANIFEST_FILE} was changed after it was saved{_BY_CHECKSUM}"
    names = [name for name, saved in manifest.files.items() if saved.sha256 is not None]
    with ThreadPoolExecutor(min(_AT_ONCE, os.cpu_count() or 1)) as pool:
        for name, found in zip(names, pool.map(lambda name: sha256_of(checkpoint / name), names), strict=True):
            if found != manifest.files[name].sha256:
                yield f"{name} was changed or damaged after it was saved{_BY_CHECKSUM}"


def sha256_of(path: Path) -> str:
    """Of a file's content, in hex digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _digest_of(values: Mapping[str, Any]) -> str:
    """SHA-256 of the manifest's fields but this one, however they are laid out in the file."""
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()
