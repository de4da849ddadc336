"""The same sweep under other launchers and a sweeper that searches: real jobs, their numbers, states and skips."""

import subprocess
from pathlib import Path

import psutil
import pytest

from tests.helpers.commands import SHORT, Done, lasting_metrics, start, torpor
from tests.helpers.processes import wait_until, workers_of

optuna = pytest.importorskip("optuna", reason="pip install 'torpor[joblib,submitit,optuna]'")
PARALLEL = ("-m", *SHORT, "seed=1,2", "hydra/launcher=parallel", "hydra.sweep.dir=sweep")
SEARCH = (
    *("-m", *SHORT, "seed=2", "hydra.sweep.dir=search"),
    *("hydra/launcher=background", "hydra/sweeper=search", "hydra/sweeper/sampler=grid"),
    *("hydra.sweeper.n_jobs=2", "hydra.sweeper.storage=sqlite:///study.db", "objective=[heldout_accuracy,host_bytes]"),
)


@pytest.fixture(scope="module")
def sweeps(tmp_path_factory) -> tuple[Done, Done]:
    """Two jobs at once in joblib's processes; beside them an Optuna search whose two trials submitit runs."""
    directory = tmp_path_factory.mktemp("launchers")
    commands = [start(directory, *PARALLEL), start(directory, *SEARCH, "algo.micro_batch_size=choice(5,8)")]
    outputs = [command.communicate(timeout=400) for command in commands]
    done = [Done(command.returncode, *output, directory) for command, output in zip(commands, outputs, strict=True)]
    return done[0], done[1]


def trials(directory: Path) -> list:
    return optuna.load_study(study_name="train", storage=f"sqlite:///{directory}/study.db").trials


def test_joblib_runs_jobs_side_by_side(sweeps):
    done, _ = sweeps
    assert done.code == 0, done.stderr
    for number in "01":
        job = done.directory / "sweep" / number
        assert f"job {number} writes to {job}/output.log\n" in done.stdout
        assert f"job {number} finished\n" in done.stdout
        assert "platform: cpu (stand-in for CUDA)" in (job / "output.log").read_text()
    assert "platform:" not in done.stdout  # what jobs print does not mix
    assert f"comparison: {done.directory}/sweep/comparison.html" in done.stdout


def test_a_job_is_the_same_under_joblib_and_submitit(sweeps):
    """Seed 2, which the search ran too, with the micro-batch size of the preset."""
    directory = sweeps[0].directory
    (finished,) = [job for job in (directory / "search").glob("[01]") if (job / "result.json").exists()]
    assert lasting_metrics(finished) == lasting_metrics(directory / "sweep" / "1")
    assert lasting_metrics(finished) != lasting_metrics(directory / "sweep" / "0")


def test_a_failed_trial_does_not_end_the_search(sweeps):
    _, done = sweeps
    assert done.code == 2
    assert "error: 1 of 2 jobs did not finish" in done.stderr
    found = {trial.params["algo.micro_batch_size"]: trial for trial in trials(done.directory)}
    assert (found[5].state.name, found[8].state.name) == ("FAIL", "COMPLETE")
    accuracy, host_bytes = found[8].values
    last = lasting_metrics(done.directory / "sweep" / "1")[-1]
    assert accuracy == last["heldout_accuracy"]
    assert host_bytes > 0
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("job ") and " refused: " in line]
    assert "algo.prompts_per_step * algo.responses_per_prompt = 8 * 2 = 16 is no multiple of" in line


def test_a_stored_study_goes_on(sweeps):
    before = len(trials(sweeps[1].directory))
    again = torpor(
        sweeps[1].directory,
        *(word.replace("=search", "=more") if word.startswith("hydra.sweep.dir") else word for word in SEARCH),
        *("hydra/sweeper/sampler=random", "hydra.sweeper.n_trials=1", "algo.micro_batch_size=5"),
    )
    assert again.code == 2
    assert [trial.state.name for trial in trials(sweeps[1].directory)[before:]] == ["FAIL"]


def test_a_sweep_again_under_another_launcher_skips_what_has_finished(sweeps):
    done, _ = sweeps
    records = done.directory / "sweep" / "0" / "metrics.jsonl"
    before = records.stat().st_mtime_ns
    words = [word.replace("=parallel", "=background") for word in PARALLEL]
    again = torpor(done.directory, *words)
    assert again.code == 0, again.stderr
    assert records.stat().st_mtime_ns == before
    for number in "01":
        output = (done.directory / "sweep" / number / "output.log").read_text()
        assert output.endswith(f"finished already: {done.directory}/sweep/{number}\n")


def has_started(process: subprocess.Popen) -> bool:
    children = psutil.Process(process.pid).children()
    return sum("popen_loky" in " ".join(child.cmdline()) for child in children) == 2


def trains(process: subprocess.Popen) -> bool:
    return len(workers_of(process)) == 2


@pytest.mark.parametrize("condition", [has_started, trains])
def test_a_killed_parallel_sweep_takes_its_processes_along(condition, tmp_path):
    """Also those that it has just started, which have no job yet."""
    process = start(tmp_path, *PARALLEL, "algo.num_steps=5000")
    wait_until(lambda: condition(process), process)
    family = psutil.Process(process.pid).children(recursive=True)
    assert len(family) >= 2
    process.kill()
    survivors = psutil.wait_procs(family, timeout=20)[1]
    for survivor in survivors:
        survivor.kill()
    process.communicate()
    assert survivors == []
