"""What is refused ends with 2, and writes into no folder that belongs to a job, whichever way it came to be refused."""

import json
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.helpers.commands import ROOT, SHORT, start, torpor
from tests.helpers.processes import wait_until
from tests.helpers.trees import tree

optuna = pytest.importorskip("optuna", reason="pip install 'torpor[joblib,submitit,optuna]'")


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Path:
    """A single run, and a sweep of two jobs, in "run" and "sweep"."""
    directory = tmp_path_factory.mktemp("finished")
    single = start(directory, *SHORT, "hydra.run.dir=run")
    sweep = start(directory, "-m", *SHORT, "seed=1,2", "hydra.sweep.dir=sweep")
    for process in (single, sweep):
        _, stderr = process.communicate(timeout=300)
        assert process.returncode == 0, stderr
    return directory


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("seed=2", "holds a run of another config, which this one would overwrite"),
        ("algo.epochs=0", "algo.epochs=0: must be between"),
        ("hydra.output_subdir=mine", "hydra.output_subdir=mine: a job leaves Hydra's record in .hydra"),
        ("reward=no_such_module.f", "reward=no_such_module.f cannot be imported"),
        pytest.param(
            "logger=wandb",
            "logger=wandb needs: pip install 'torpor[wandb]'",
            marks=pytest.mark.skipif(find_spec("wandb") is not None, reason="it is installed"),
        ),
    ],
)
def test_a_refused_command_leaves_a_finished_job_as_it_is(finished, override, message):
    before = tree(finished / "run")
    done = torpor(finished, *SHORT, "hydra.run.dir=run", override)
    assert (done.code, done.stdout) == (2, "")
    assert message in done.stderr
    assert tree(finished / "run") == before


def test_a_finished_job_is_not_run_again(finished):
    before = tree(finished / "run")
    again = torpor(finished, *SHORT, "hydra.run.dir=run")
    assert again.code == 0
    assert "finished already: " in again.stdout
    assert tree(finished / "run") == before


@pytest.mark.parametrize("launcher", [(), ("hydra/launcher=parallel",), ("hydra/launcher=background",)])
def test_nor_does_a_refused_sweep(finished, launcher):
    """Seed 1 has finished as job 0, seed 3 is not the job 1 that lies there, and job 2 is new and bad."""
    sweep = finished / "sweep"
    before = tree(sweep / "0"), tree(sweep / "1")
    done = torpor(finished, "-m", *SHORT, "seed=3,4", "hydra.sweep.dir=sweep", *launcher)
    assert done.code == 2
    assert (tree(sweep / "0"), tree(sweep / "1")) == before
    for job, seed in enumerate((3, 4)):
        assert f"job {job} refused: {sweep}/{job} holds a run of another config" in done.stdout
        assert re.search(rf"^\s+{job}\s+seed={seed}\s+refused\s", done.stdout, re.MULTILINE)
    assert "error: 2 of 2 jobs did not finish" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_running_job_is_left_alone(tmp_path):
    process = start(tmp_path, *SHORT, "algo.num_steps=500", "hydra.run.dir=run")
    run = tmp_path / "run"
    wait_until((run / "metrics.jsonl").exists, process)
    growing = ("metrics.jsonl", "memory.jsonl")
    before = {name: file for name, file in tree(run).items() if name not in growing}
    for override in ("seed=2", "algo.num_steps=500", "algo.epochs=0"):  # another, the same, a bad one
        done = torpor(tmp_path, *SHORT, "algo.num_steps=500", "hydra.run.dir=run", override)
        assert done.code == 2, done.stderr
    assert "must be between" in done.stderr
    assert process.poll() is None
    after = {name: file for name, file in tree(run).items() if name not in growing}
    process.kill()
    process.communicate()
    assert after == before


def test_files_of_somebody_else_are_neither_overwritten_nor_removed(tmp_path):
    run = tmp_path / "run"
    for name in ("metrics.jsonl", "logs/rank_0.log", "checkpoints/step_5.tmp/weights"):
        (run / name).parent.mkdir(parents=True, exist_ok=True)
        (run / name).write_text("somebody's\n")
    before = tree(run)
    single = torpor(tmp_path, *SHORT, "hydra.run.dir=run")
    assert single.code == 2
    assert f"error: {run} holds metrics.jsonl, logs/rank_0.log, checkpoints/step_5.tmp but no config" in single.stderr
    sweep = torpor(tmp_path, "-m", *SHORT, "hydra.sweep.dir=.", "hydra.sweep.subdir=run")
    assert sweep.code == 2
    assert tree(run) == before


def test_a_search_that_goes_on_in_its_own_folder_adds_trials(tmp_path):
    """Whose folders have the numbers that the trials have in the study."""
    search = (
        *("-m", *SHORT, "hydra.sweep.dir=search", "hydra/sweeper=search", "hydra/sweeper/sampler=random"),
        *("hydra.sweeper.storage=sqlite:///study.db", "hydra.sweeper.n_trials=1", "seed=range(1,1000)"),
    )
    first = torpor(tmp_path, *search)
    assert first.code == 0, first.stderr
    before = tree(tmp_path / "search" / "0")
    again = torpor(tmp_path, *search)
    assert again.code == 0, again.stderr
    assert tree(tmp_path / "search" / "0") == before
    overrides = [(tmp_path / "search" / n / ".hydra" / "overrides.yaml").read_text() for n in "01"]
    seeds = [
        trial.params["seed"]
        for trial in optuna.load_study(study_name="train", storage=f"sqlite:///{tmp_path}/study.db").trials
    ]
    assert all(f"seed={seed}" in text for seed, text in zip(seeds, overrides, strict=True))
    assert (tmp_path / "search" / "1" / "result.json").exists()


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (
            "hydra.sweeper.storage=sqlite:////nowhere/study.db",
            "hydra.sweeper.storage=sqlite:////nowhere/study.db cannot",
        ),
        ("hydra.sweeper.storage=nonsense", "hydra.sweeper.storage=nonsense cannot be opened"),
        ("algo.epochs=choice(0,-1)", "the search has no best trial: none has finished"),
        ("roles.actor.optimizer.lr=interval(5,1)", "the sweep ended: ValueError: The `low` value must be"),
    ],
)
def test_a_search_that_fails_says_so_in_one_line(tmp_path, override, message):
    search = ("-m", *SHORT, "hydra.sweep.dir=search", "hydra/sweeper=search", "hydra.sweeper.n_trials=1")
    found = torpor(tmp_path, *search, "hydra/sweeper/sampler=random", override)
    assert found.code == 2
    assert f"error: {message}" in found.stderr
    for noise in ("Traceback", "alembic", "Warning"):
        assert noise not in found.stderr + found.stdout


@pytest.mark.parametrize("mode", [("hydra.run.dir=file",), ("hydra.sweep.dir=file", "-m")])
def test_a_file_in_the_folders_place_is_named(tmp_path, mode):
    (tmp_path / "file").touch()
    found = torpor(tmp_path, *SHORT, *mode)
    assert found.code == 2
    assert f"error: {mode[0]} cannot be made a folder (File exists): choose another" in found.stderr
    assert "Traceback" not in found.stderr


def test_a_refused_job_is_in_the_table_whatever_hydra_leaves_behind(tmp_path):
    done = torpor(tmp_path, "-m", *SHORT, "algo.epochs=0,-1", "hydra.output_subdir=null", "hydra.sweep.dir=sweep")
    assert done.code == 2
    for job, epochs in enumerate((0, -1)):
        assert f"job {job} refused: algo.epochs={epochs}: must be between" in done.stdout


@pytest.mark.parametrize("text", ["override /hydra/launcher: parallel", "override /hydra/launcher: background"])
def test_a_swept_option_cannot_choose_the_launcher(tmp_path, text):
    folder = tmp_path / "mine" / "experiment"
    folder.mkdir(parents=True)
    (folder / "a.yaml").write_text("# @package _global_\nseed: 1\n")
    (folder / "b.yaml").write_text(f"# @package _global_\ndefaults:\n  - {text}\n")
    done = torpor(tmp_path, "--config-dir", "mine", "-m", *SHORT, "experiment=a,b")
    assert (done.code, done.jobs()) == (2, {})
    assert done.stderr.startswith("error: experiment=b sets hydra.launcher, which is read once for the whole sweep")


def test_nor_can_it_set_the_launcher_up(tmp_path):
    folder = tmp_path / "mine" / "experiment"
    folder.mkdir(parents=True)
    (folder / "a.yaml").write_text("# @package _global_\nhydra:\n  sweep:\n    dir: elsewhere\n")
    done = torpor(tmp_path, "--config-dir", "mine", "-m", *SHORT, "seed=1,2", "experiment=none,a")
    assert (done.code, done.jobs()) == (2, {})
    assert "error: experiment=a sets hydra.sweep, which is read once" in done.stderr
    assert not (tmp_path / "elsewhere").exists()


def test_an_option_that_does_not_exist_is_all_that_is_said(tmp_path):
    done = torpor(tmp_path, "-m", "memory=full,typo")
    assert done.code == 2
    assert "Could not find 'memory/typo'" in done.stderr
    assert "lists no values" not in done.stderr


def test_the_console_script_finds_modules_of_the_current_folder(tmp_path):
    """As pip writes the script: its own folder is the first where Python looks, not the current one."""
    scripts = tmp_path / "bin"
    scripts.mkdir()
    script = scripts / "torpor"
    script.write_text(
        "import sys\nfrom trainer.command.__main__ import main\nif __name__ == '__main__':\n    sys.exit(main())\n"
    )
    (tmp_path / "my_rewards.py").write_text("def f(response, example):\n    return 1.0\n")
    (tmp_path / "my_tasks.py").write_text("from trainer.tasks.arithmetic import ArithmeticTask as Mine\n")
    command = [sys.executable, str(script), *SHORT, "reward=my_rewards.f", "task._target_=my_tasks.Mine"]
    environment = {"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": "", "PATH": "/usr/bin:/bin"}
    done = subprocess.run(
        [*command, "hydra.run.dir=run"], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "run" / "config.json").read_text())["reward"] == "my_rewards.f"
