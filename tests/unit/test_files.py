"""What a full disk does to the files of a run: they are whole, and the error names the one that is not written."""

from pathlib import Path

import pytest

from tests.full_disk import largest_file
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
