"""Whose a folder is: a job's, somebody else's, or nobody's; and what a refused job leaves in each."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.composing import SMALL, config_of
from tests.helpers.trees import tree
from trainer.command import jobs

RECORD = {"overrides.yaml": "- seed=1\n", "config.yaml": "seed: 1\n", "hydra.yaml": "hydra: {}\n"}


def put(folder: Path, name: str) -> None:
    path = folder / name
    if name.endswith("/"):
        path.mkdir(parents=True)
    else:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("somebody's\n")


@pytest.mark.parametrize(
    "name",
    [
        "metrics.jsonl",
        "memory.jsonl",
        "result.json",
        "report.md",
        "training.png",
        "stop",
        "failure.txt",
        "logs/rank_0.log",
        "logs/rank_of_teams.csv",
        "logs/elastic_0.log",
        "checkpoints/step_3.tmp/",
        "checkpoints/latest.tmp",
        "checkpoints/step_3/",
        "hf_model/config.json",
        ".hydra/config.yaml",
    ],
)
def test_a_folder_with_files_of_somebody_else_is_refused_and_stays_as_it_is(name, tmp_path):
    put(tmp_path, name)
    before = tree(tmp_path)
    shown = name.rstrip("/") if name.startswith(("logs", "checkpoints")) else name.split("/")[0]
    with pytest.raises(ValueError, match=rf"{tmp_path} holds {shown} but no config.json of a run: a run would overwr"):
        jobs.require_room(tmp_path)
    jobs.note_refusal(tmp_path, "refused", RECORD)
    assert tree(tmp_path) == before


@pytest.mark.parametrize("name", ["notes.txt", "logs/my.log", "checkpoints/best.tmp.txt", "tensorboard/events"])
def test_what_a_run_leaves_alone_may_lie_there(name, tmp_path):
    put(tmp_path, name)
    jobs.require_room(tmp_path)
    jobs.claim(tmp_path, config_of(*SMALL), None)
    assert (tmp_path / name).read_text() == "somebody's\n"


def test_checkpoints_that_were_copied_may_lie_there(tmp_path):
    put(tmp_path, "checkpoints/step_3/manifest.json")
    put(tmp_path, "checkpoints/latest")
    jobs.require_room(tmp_path)


def test_many_files_are_counted(tmp_path):
    for name in ("metrics.jsonl", "memory.jsonl", "report.md", "logs/rank_0.log", "logs/rank_1.log"):
        put(tmp_path, name)
    with pytest.raises(ValueError, match=r"holds metrics\.jsonl, memory\.jsonl, report\.md and 2 more but no config"):
        jobs.require_room(tmp_path)


def test_a_refused_job_leaves_a_note_in_a_folder_that_is_nobodys_again_and_again(tmp_path):
    for message in ("algo.epochs=0: must be at least 1", "algo.epochs=-1: must be at least 1"):
        jobs.note_refusal(tmp_path / "run", message, RECORD)
        assert (tmp_path / "run" / "failure.txt").read_text() == f"{message}\n"
        assert (tmp_path / "run" / ".hydra" / "overrides.yaml").read_text() == "- seed=1\n"
        assert jobs.state_of(tmp_path / "run") == "refused"
    jobs.require_room(tmp_path / "run")


@pytest.mark.parametrize("has_finished", [True, False])
def test_a_refused_job_leaves_nothing_in_the_folder_of_a_job(has_finished, tmp_path):
    """Neither of one that has finished nor of one that was cut off."""
    with jobs.held(tmp_path):
        jobs.claim(tmp_path, config_of(*SMALL), None, hydra_record=RECORD)
    if has_finished:
        jobs.write_result(tmp_path, {"heldout_accuracy": 0.5, "host_bytes": 1})
    before = tree(tmp_path)
    with pytest.raises(ValueError, match="holds a run of another config"):
        jobs.finished(tmp_path, config_of(*SMALL, "seed=2"))
    jobs.note_refusal(tmp_path, "refused", {"overrides.yaml": "- seed=2\n"})
    assert tree(tmp_path) == before
    assert jobs.state_of(tmp_path) == ("finished" if has_finished else "cut off")


def test_nor_where_another_process_is_about_to_begin(tmp_path):
    program = (
        "import sys, pathlib; from trainer.command import jobs\n"
        "with jobs.held(pathlib.Path(sys.argv[1])):\n"
        "    print('holds', flush=True)\n"
        "    sys.stdin.read()\n"
    )
    command = [sys.executable, "-c", program, str(tmp_path)]
    root = Path(__file__).parents[2]
    with subprocess.Popen(command, cwd=root, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "holds\n"
        before = tree(tmp_path)
        jobs.note_refusal(tmp_path, "refused", RECORD)
        assert tree(tmp_path) == before
        process.communicate("")


def test_a_model_folder_is_no_runs(tmp_path):
    """Its config.json is not of a run."""
    (tmp_path / "config.json").write_text('{"model_type": "llama", "hidden_size": 64}')
    with pytest.raises(ValueError, match=rf"{tmp_path}/config.json has no field launch.*choose another hydra.run.dir"):
        jobs.finished(tmp_path, config_of(*SMALL))


def test_what_a_killed_save_left_goes_when_its_run_starts_again_and_not_before(tmp_path):
    jobs.claim(tmp_path, config_of(*SMALL), None)
    put(tmp_path, "checkpoints/step_3.tmp/")
    put(tmp_path, "checkpoints/notes.tmp")
    jobs.finished(tmp_path, config_of(*SMALL))
    assert (tmp_path / "checkpoints" / "step_3.tmp").exists()
    jobs.claim(tmp_path, config_of(*SMALL), None)
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["notes.tmp"]
