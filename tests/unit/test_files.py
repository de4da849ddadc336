"""The files of a run are whole after a full disk or a power cut, and the error names the one that is not written."""

import os
import shutil
from pathlib import Path

import pytest

from tests.helpers.full_disk import largest_file
from trainer.common.files import UnwritableFile, write_whole
from trainer.report import MEMORY_FILE, METRICS_FILE, RunRecords, read_records


def test_a_file_is_as_it_was_when_the_new_one_cannot_be_written(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    write_whole(path, "old")
    with largest_file(2), pytest.raises(UnwritableFile, match=f"^cannot write {path}: File too large$"):
        write_whole(path, "new")
    assert [(found.name, found.read_text()) for found in tmp_path.iterdir()] == [("result.json", "old")]
    write_whole(path, "new")
    assert path.read_text() == "new"


@pytest.mark.parametrize("name", [METRICS_FILE, MEMORY_FILE])
def test_a_record_that_cannot_be_written_ends_the_run_and_leaves_those_before(name: str, tmp_path: Path) -> None:
    def write_two() -> None:
        with RunRecords(tmp_path) as records:
            append = {METRICS_FILE: records.metrics, MEMORY_FILE: records.memory}[name]
            append({"step": 1})
            with largest_file(20):
                append({"step": 2, "reward": 0.25})

    with pytest.raises(UnwritableFile, match=f"^cannot write {tmp_path}/{name}: File too large$"):
        write_two()
    with largest_file(3), pytest.raises(UnwritableFile, match=f"^cannot write {tmp_path}/{name}: File too large$"):
        RunRecords(tmp_path, resumed_after=1)
    with RunRecords(tmp_path, resumed_after=1):
        assert read_records(tmp_path / name) == [{"step": 1}]


def test_a_file_is_on_disk_before_it_has_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a power cut leaves an empty file of that name."""
    calls, fsync, replace = [], os.fsync, os.replace

    def note_sync(descriptor: int) -> None:
        calls.append(("sync", Path(os.readlink(f"/proc/self/fd/{descriptor}")).name))
        fsync(descriptor)

    def note_replace(old: Path, new: Path) -> None:
        calls.append(("replace", new.name))
        replace(old, new)

    monkeypatch.setattr(os, "fsync", note_sync)
    monkeypatch.setattr(os, "replace", note_replace)
    write_whole(tmp_path / "result.json", "{}")
    assert calls == [("sync", "result.json.tmp"), ("replace", "result.json"), ("sync", tmp_path.name)]
    calls.clear()
    with RunRecords(tmp_path) as records:
        records.memory({"step": 1})
        assert calls == []
        records.metrics({"step": 1})
        assert calls == [("sync", METRICS_FILE), ("sync", MEMORY_FILE)]


@pytest.mark.parametrize("name", [METRICS_FILE, MEMORY_FILE])
@pytest.mark.parametrize("how", ["delete", "replace", "delete folder"])
def test_records_that_somebody_deletes_end_the_run(name: str, how: str, tmp_path: Path) -> None:
    """And not only when it has trained to the end."""
    run = tmp_path / "run"
    with RunRecords(run) as records:
        append = {METRICS_FILE: records.metrics, MEMORY_FILE: records.memory}[name]
        append({"step": 1})
        match how:
            case "delete":
                (run / name).unlink()
            case "replace":
                (tmp_path / "other").write_text("")
                (tmp_path / "other").rename(run / name)
            case "delete folder":
                shutil.rmtree(run)
        with pytest.raises(UnwritableFile, match=f"^cannot write {run}/{name}: it was deleted or replaced while the"):
            append({"step": 2})


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"step": 2', "is not JSON, but cut off"),
        (b"", "is empty"),
        (b"[2]", "holds a list"),
        (b'{"step": 2.5}', "has step=2.5, must be a whole number"),
        (b'{"kl": 1}', "has no field step"),
    ],
)
def test_a_damaged_line_of_a_record_file_is_named(line, message, tmp_path):
    path = tmp_path / METRICS_FILE
    path.write_bytes(b'{"step": 1}\n' + line + b'\n{"step": 3}\n{"step"')
    with pytest.raises(ValueError, match=rf"^{path}, line 2 {message}.*: mend or remove the line$"):
        read_records(path)
