"""Presets for launchers and sweepers, objectives, and what a sweep says about its jobs."""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from hydra import compose, initialize_config_module

from tests.helpers.composing import SMALL, config_of
from trainer.command import attempts, exits, jobs, sweep_notes, sweeps
from trainer.config import compose as configuration
from trainer.config import objectives

ROOT = Path(__file__).parents[2]
needs_plugins = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("joblib", "submitit", "optuna")),
    reason="pip install 'torpor[joblib,submitit,optuna]'",
)


def hydra_settings(*overrides: str):
    configuration.register()
    with initialize_config_module("conf", version_base="1.3"):
        return compose("train", overrides=list(overrides), return_hydra_config=True).hydra


@needs_plugins
def test_every_preset_composes_with_the_installed_launchers():
    """Ray's needs an environment of its own, see tests/scripts/try_ray.sh."""
    presets = {path.stem for path in (ROOT / "conf" / "hydra" / "launcher").glob("*.yaml")}
    assert presets == {"parallel", "background", "slurm", "ray_cluster"}
    parallel = hydra_settings("hydra/launcher=parallel", "hydra.launcher.n_jobs=3").launcher
    assert (parallel.n_jobs, parallel.pre_dispatch) == (3, "n_jobs")
    assert "LocalLauncher" in hydra_settings("hydra/launcher=background").launcher._target_
    slurm = hydra_settings("hydra/launcher=slurm", "launch.nnodes=2", "launch.nproc=8").launcher
    assert (slurm.nodes, slurm.tasks_per_node, slurm.gpus_per_node) == (2, 1, 8)


@needs_plugins
@pytest.mark.parametrize(
    ("objective", "direction"),
    [
        ("[heldout_accuracy]", ["maximize"]),
        ("[host_bytes]", ["minimize"]),
        ("[host_bytes,heldout_accuracy]", ["minimize", "maximize"]),
    ],
)
def test_the_search_goes_where_the_objective_is_better(objective, direction):
    sweeper = hydra_settings("hydra/sweeper=search", f"objective={objective}").sweeper
    assert sweeper.direction == direction
    assert sweeper.max_failure_rate == 1.0
    assert sweeper.study_name == "train"


def test_objectives_are_numbers_of_the_last_record():
    results = objectives.of_record({"step": 3, "heldout_accuracy": 0.25, "asleep_backup_bytes": 4096, "kl": 1.0})
    assert results == {"heldout_accuracy": 0.25, "host_bytes": 4096}
    assert objectives.values(results, names=["host_bytes"]) == 4096.0
    assert objectives.values(results, names=["host_bytes", "heldout_accuracy"]) == (4096.0, 0.25)


@pytest.mark.parametrize("objective", ["[]", "[accuracy]", "[host_bytes,host_bytes]"])
def test_other_objectives_are_refused(objective):
    with pytest.raises(ValueError, match=r"objective=\[.*\]: must list one or more of heldout_accuracy and host_bytes"):
        config_of(*SMALL, f"objective={objective}")


def test_what_does_not_change_the_result_makes_no_other_job(tmp_path):
    config = config_of(*SMALL)
    jobs.claim(tmp_path, config, None)
    jobs.write_result(tmp_path, {"heldout_accuracy": 0.5, "host_bytes": 1})
    for override in ("objective=[host_bytes]", "launch.max_restarts=2", "launch.host_memory_gib=64"):
        assert jobs.finished(tmp_path, config_of(*SMALL, override)) == {"heldout_accuracy": 0.5, "host_bytes": 1}
    with pytest.raises(ValueError, match="holds a run of another config"):
        jobs.finished(tmp_path, config_of(*SMALL, "launch.nproc=2"))


def test_a_job_runs_in_one_process_at_a_time(tmp_path):
    with jobs.held(tmp_path):
        with pytest.raises(ValueError, match=f"the job in {tmp_path} is running in another process: wait for it"):
            with jobs.held(tmp_path):
                pass
    with jobs.held(tmp_path):
        pass


@pytest.fixture
def sweep(tmp_path: Path) -> Path:
    """Four jobs: finished, failed in a worker, refused, killed."""
    for number in range(4):
        (tmp_path / str(number) / ".hydra").mkdir(parents=True)
        (tmp_path / str(number) / ".hydra" / "overrides.yaml").write_text(f"[seed={number}, memory=lean]")
    (tmp_path / "1" / "config.json").write_text("{}")
    jobs.write_result(tmp_path / "0", {"heldout_accuracy": 0.5, "host_bytes": 1})
    log = f"{tmp_path}/1/logs/rank_0"
    jobs.write_failure(tmp_path / "1", f"rank 0 of 1 failed: E: no\n  traceback: {log}.traceback\n  log: {log}.log")
    jobs.write_failure(tmp_path / "2", "algo.epochs=0: must be at least 1\nhint: none")
    return tmp_path


def test_a_sweeps_table_and_why_jobs_have_not_finished(sweep):
    found = sweeps.outcomes(sweep)
    rows = [(row[0], row[1], row[2]) for row in sweeps.table_of(sweep, found).rows]
    states = ["finished", "failed", "refused", "cut off"]
    assert rows == [(str(n), f"seed={n}", state) for n, state in enumerate(states)]
    assert sweeps.failure_lines(found) == [
        "job 1 failed: rank 0 of 1 failed: E: no",
        f"  log: {sweep}/1/logs/rank_0.traceback",
        "job 2 refused: algo.epochs=0: must be at least 1",
        f"  log: {sweep}/2/failure.txt",
        "job 3 cut off: killed, or still running: no result and no error",
        f"  log: {sweep}/3/logs",
    ]


def test_damaged_files_of_one_job_leave_the_sweep_its_table(sweep):
    result = sweep / "0" / "result.json"
    result.write_text("")  # as a power cut may leave it
    (sweep / "1" / ".hydra" / "overrides.yaml").write_text("a: [")
    (sweep / "2" / "failure.txt").write_text("")
    found = sweeps.outcomes(sweep)
    rows = [row[1:] for row in sweeps.table_of(sweep, found).rows]
    assert [row[1:] for row in rows] == [("damaged", "-"), ("failed", "-"), ("refused", "-"), ("cut off", "-")]
    assert [row[0] for row in rows] == ["seed=0 memory=lean", "", "seed=2 memory=lean", "seed=3 memory=lean"]
    lines = sweeps.failure_lines(found)
    assert lines[0].startswith(f"job 0 damaged: {result} is empty: remove it, and the same command goes on from")
    assert lines[4] == "job 2 refused: killed, or still running: no result and no error"


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("config.json", "{", "is not JSON, but cut off .*: choose another hydra.run.dir"),
        ("config.json", '{"launch": []}', r"has launch=\[\], must be an object"),
        ("result.json", "[0.5]", "holds a list, must hold an object: remove it"),
        ("result.json", '{"heldout_accuracy": "0.5"}', "has heldout_accuracy='0.5', must be a finite number"),
        ("result.json", '{"heldout_accuracy": NaN}', "has heldout_accuracy=NaN, must be a finite number"),
    ],
)
def test_a_damaged_file_of_a_job_is_named(name, text, message, tmp_path):
    jobs.claim(tmp_path, config_of(*SMALL), None)
    jobs.write_result(tmp_path, {"heldout_accuracy": 0.5, "host_bytes": 1})
    (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match=rf"^{tmp_path}/{name} {message}"):
        jobs.finished(tmp_path, config_of(*SMALL))


def test_what_the_last_command_met_counts_more_than_what_lies_in_the_folder(sweep):
    """Job 0 belongs to a run that has finished; job 4 has no folder at all; a full disk has cut off the last line."""
    sweep_notes.add(
        sweep, sweep_notes.Note("0", ["seed=7"], "holds a run of another config\nhint: none", exits.REFUSED)
    )
    sweep_notes.add(sweep, sweep_notes.Note("4", ["seed=8"], "rank 0 failed\n  log: /a/log", exits.FAILED))
    with (sweep / sweep_notes.NOTES_FILE).open("a") as file:
        file.write('{"job": "5", "overr')
    found = {job.job: job for job in sweeps.outcomes(sweep)}
    assert list(found) == ["0", "1", "2", "3", "4"]
    assert (found["0"].overrides, found["0"].state, found["0"].reason, found["0"].log) == (
        ["seed=7"],
        "refused",
        "holds a run of another config",
        None,
    )
    assert (found["4"].state, found["4"].log) == ("failed", "/a/log")
    sweep_notes.clear(sweep)
    assert [job.state for job in sweeps.outcomes(sweep)] == ["finished", "failed", "refused", "cut off"]


@pytest.mark.parametrize(
    ("states", "code"),
    [
        (["finished", "finished"], 0),
        (["finished", "refused"], exits.REFUSED),
        (["refused", "failed"], exits.FAILED),
        (["refused", "cut off"], exits.FAILED),
        (["damaged"], exits.FAILED),
    ],
)
def test_a_sweep_is_refused_only_if_none_of_its_runs_failed(states, code):
    assert sweeps.exit_code([sweeps.Outcome(str(n), [], state) for n, state in enumerate(states)]) == code


def test_a_failure_is_forgotten_when_the_job_starts_again(sweep):
    jobs.claim(sweep / "1", config_of(*SMALL), None)
    assert jobs.state_of(sweep / "1") == "cut off"


def test_output_goes_to_the_jobs_own_file_and_back(tmp_path):
    program = (
        "import os, subprocess, sys; from pathlib import Path; from trainer.command import jobs\n"
        "with jobs.own_output(Path('7').resolve()):\n"
        "    print('inside', flush=True)\n"
        "    print('an error inside', file=sys.stderr)\n"
        "    subprocess.run(['echo', 'a child'])\n"
        "    jobs.write_result(Path('7'), {'heldout_accuracy': 1.0})\n"
        "print('outside')"
    )
    command, environment = [sys.executable, "-c", program], os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60)
    path = tmp_path / "7" / "output.log"
    assert done.stdout == f"job 7 writes to {path}\njob 7 finished\noutside\n"
    assert done.stderr == ""
    assert path.read_text().splitlines() == ["inside", "an error inside", "a child"]


def test_the_list_of_hydras_traps_names_tests_that_exist():
    named = re.findall(r"`(test_\w+)`", (ROOT / "tests" / "HYDRA.md").read_text())
    sources = "".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    assert len(named) > 15
    assert [name for name in named if f"def {name}(" not in sources] == []


def test_what_is_said_after_sigterm_is_what_was_saved(tmp_path):
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    (folder / "latest").write_text("step_3\n")
    assert attempts._stopped_after(3, tmp_path) == (
        "SIGTERM: saved a checkpoint after step 3; the same command goes on from there"
    )
    assert attempts._stopped_after(4, tmp_path) == (
        f"SIGTERM: ended after step 4, which could not be saved; the same command goes on from {folder}/step_3"
    )
