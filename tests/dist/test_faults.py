"""Workers killed, jobs asked to end, several nodes: the job goes on, its numbers stay, and no process is left over."""

import re
import signal
import subprocess
from pathlib import Path

import psutil
import pytest

from tests.helpers.checkpoints import checkpoint_of, files
from tests.helpers.commands import SHORT, lasting_metrics, start, torpor
from tests.helpers.processes import free_port, wait_until, workers_of
from trainer.checkpoint import folder
from trainer.report import read_records

RUN = (*SHORT, "algo.num_steps=5", "checkpoint.every_steps=1", "checkpoint.keep_last=9")


def kill_worker_after(process: subprocess.Popen, run: Path, step: int) -> None:
    def is_latest() -> bool:  # a moment after it exists
        latest = folder.latest(run)
        return latest is not None and int(latest.name.removeprefix("step_")) >= step

    wait_until(is_latest, process)
    (worker,) = workers_of(process)
    worker.kill()


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("unbroken")
    done = torpor(directory, *RUN, "hydra.run.dir=run")
    assert done.code == 0, done.stderr
    return directory / "run"


def assert_same_end(run: Path, unbroken: Path) -> None:
    assert lasting_metrics(run) == lasting_metrics(unbroken)
    last = lasting_metrics(unbroken)[-1]["step"]
    assert files(checkpoint_of(run, last)) == files(checkpoint_of(unbroken, last))


def test_killed_workers_are_restarted_from_the_last_checkpoint(tmp_path, unbroken):
    process = start(tmp_path, *RUN, "launch.max_restarts=2", "hydra.run.dir=run")
    for step in (1, 3):
        kill_worker_after(process, tmp_path / "run", step)
    stdout, stderr = process.communicate(timeout=120)
    assert process.returncode == 0, stderr
    assert stderr.count("error: rank 0 of 1 was killed by signal 9 (SIGKILL)") == 2
    restarts = re.findall(r"^restart (\d) of 2: goes on from step (\d)$", stdout, re.MULTILINE)
    assert [number for number, _ in restarts] == ["1", "2"]
    assert all(int(step) >= least for (_, step), least in zip(restarts, (2, 4), strict=True))
    assert_same_end(tmp_path / "run", unbroken)


def test_a_killed_worker_does_not_stop_a_sweep_and_the_last_restart_is_the_last(tmp_path):
    process = start(tmp_path, "-m", *SHORT, "seed=1,2", "launch.max_restarts=1", "hydra.sweep.dir=sweep")
    records = tmp_path / "sweep" / "0" / "metrics.jsonl"  # without a checkpoint every life begins them anew
    for life in (1, 2):
        wait_until(records.exists, process)
        (worker,) = workers_of(process)
        worker.kill()
        if life == 1:
            wait_until(lambda: not records.exists(), process)
    stdout, stderr = process.communicate(timeout=120)
    assert process.returncode == 1
    assert "restart 1 of 1: goes on from the beginning\n" in stdout
    assert re.search(r"^ 0 .* failed .*\n 1 .* finished ", stdout, re.MULTILINE)
    assert "job 0 failed: rank 0 of 1 was killed by signal 9 (SIGKILL)" in stdout
    assert "error: 1 of 2 jobs did not finish" in stderr


@pytest.mark.parametrize("to_all", [False, True])
def test_sigterm_saves_after_the_step_and_the_same_command_goes_on(tmp_path, unbroken, to_all):
    """To the parent alone, as from Kubernetes or a user, or to all of a job's processes, as from Slurm."""
    process = start(tmp_path, *RUN, "hydra.run.dir=run")
    wait_until(checkpoint_of(tmp_path / "run", 1).exists, process)
    workers = workers_of(process)
    for target in [*workers, process] if to_all else [process]:
        target.send_signal(signal.SIGTERM)
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 143
    assert psutil.wait_procs(workers, timeout=5)[1] == []
    saved = re.search(r"SIGTERM: saved a checkpoint after step (\d); the same command goes on from there\n$", stderr)
    assert saved, stderr
    latest = (tmp_path / "run" / "checkpoints" / "latest").read_text()
    assert latest == f"step_{saved.group(1)}\n"
    assert not (tmp_path / "run" / "result.json").exists()
    assert not (tmp_path / "run" / "stop").exists()
    if to_all:
        return
    again = torpor(tmp_path, *RUN, "hydra.run.dir=run")
    assert again.code == 0, again.stderr
    assert "goes on from" in again.stdout
    assert_same_end(tmp_path / "run", unbroken)


def test_sigterm_without_checkpoints_ends_at_once_and_says_what_is_lost(tmp_path):
    process = start(tmp_path, *RUN, "checkpoint.every_steps=null", "algo.num_steps=500", "hydra.run.dir=run")
    wait_until((tmp_path / "run" / "metrics.jsonl").exists, process)
    workers = workers_of(process)
    process.send_signal(signal.SIGTERM)
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 143
    assert psutil.wait_procs(workers, timeout=5)[1] == []
    assert "SIGTERM: ended at once, and nothing is saved (checkpoint.every_steps=<number> saves checkpoints)" in stderr


def test_a_full_disk_ends_the_run_before_the_step_is_saved_and_names_the_file(tmp_path, unbroken):
    """No file can grow beyond what memory.jsonl has; with room again the same command goes on without a gap."""
    run = tmp_path / "run"
    process = start(tmp_path, *RUN, "hydra.run.dir=run")
    wait_until(checkpoint_of(run, 1).exists, process)
    (worker,) = workers_of(process)
    size_bytes = (run / "memory.jsonl").stat().st_size
    worker.rlimit(psutil.RLIMIT_FSIZE, (size_bytes, size_bytes))
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 1
    message = f"UnwritableFile: cannot write {run}/memory.jsonl: File too large"
    assert f"error: rank 0 of 1 failed (exit code 1): {message}\n" in stderr
    assert lasting_metrics(run)[-1]["step"] < 5
    saved = folder.latest(run)
    assert saved is not None
    assert folder.read(saved).step in {record["step"] for record in lasting_metrics(run)}
    again = torpor(tmp_path, *RUN, "hydra.run.dir=run")
    assert again.code == 0, again.stderr
    assert f"goes on from {saved}" in again.stdout
    assert_same_end(run, unbroken)
    steps = {record["step"] for record in read_records(run / "memory.jsonl")}
    assert steps == set(range(6))


def test_a_job_whose_report_cannot_be_written_has_finished(tmp_path):
    """The figures are larger than any file may be, the records are not."""
    process = start(tmp_path, *SHORT, "hydra.run.dir=run")
    psutil.Process(process.pid).rlimit(psutil.RLIMIT_FSIZE, (60_000, 60_000))
    stdout, stderr = process.communicate(timeout=120)
    assert process.returncode == 0, stderr
    assert f"no report: UnwritableFile: cannot write {tmp_path}/run/training.png: File too large" in stderr
    assert "report: " not in stdout
    left = {path.name for path in (tmp_path / "run").iterdir()}
    assert {"result.json", "metrics.jsonl", "memory.jsonl"} <= left
    assert not {name for name in left if name.startswith(("report", "training", "memory.png"))}


def test_two_nodes_are_one_job_also_after_a_worker_was_killed(tmp_path):
    """Two launchers on this host as two nodes; the worker of the second is killed once. One node with two workers is
    the same job, bit for bit."""
    run = [word.replace("num_steps=5", "num_steps=3") for word in RUN]
    one = start(tmp_path, *run, "launch.nproc=2", "hydra.run.dir=one")
    two = ("launch.nnodes=2", f"launch.rdzv_endpoint=127.0.0.1:{free_port()}", "launch.max_restarts=1")
    nodes = [start(tmp_path, *run, *two, f"launch.node_rank={rank}", "hydra.run.dir=two") for rank in (0, 1)]
    kill_worker_after(nodes[1], tmp_path / "two", 1)
    outputs = [node.communicate(timeout=200) for node in nodes]
    _, stderr = one.communicate(timeout=200)
    assert one.returncode == 0, stderr
    assert [node.returncode for node in nodes] == [0, 0], "\n".join(words[-3000:] for _, words in outputs)
    assert "workers: 1 on node 0 of 2" in outputs[0][0]
    assert re.search(r"restart 1 of 1: goes on from step [234]", outputs[0][0])
    assert "restart 1 of 1: goes on from where node 0 does" in outputs[1][0]
    assert "rank 1 of 2 was killed by signal 9" in outputs[1][1]
    assert "report: " in outputs[0][0]
    assert "report: " not in outputs[1][0]
    assert lasting_metrics(tmp_path / "two") == lasting_metrics(tmp_path / "one")
    assert files(checkpoint_of(tmp_path / "two", 3)) == files(checkpoint_of(tmp_path / "one", 3))
    assert {path.name for path in (tmp_path / "two" / "logs").glob("rank_*.log")} == {"rank_0.log", "rank_1.log"}
    assert not (tmp_path / "two" / "failure.txt").exists()
    assert {path.parent.name for path in tmp_path.rglob(".hydra")} == {"one", "two"}  # of two workers or nodes: one


def test_nodes_with_different_settings_are_told_which(tmp_path):
    """But for threads, which each host counts for itself; also a node that finds the config of node 0 in the folder."""
    two = ("launch.nnodes=2", f"launch.rdzv_endpoint=127.0.0.1:{free_port()}", "hydra.run.dir=two")
    own = (("launch.node_rank=0", "seed=1"), ("launch.node_rank=1", "seed=2", "launch.threads_per_worker=2"))
    nodes = []
    for settings in own:
        nodes.append(start(tmp_path, *RUN, *two, *settings))
        wait_until((tmp_path / "two" / "config.json").exists, nodes[-1])
    for rank, node in enumerate(nodes):
        _, stderr = node.communicate(timeout=200)
        assert node.returncode == 1
        (line,) = [line for line in stderr.splitlines() if line.startswith("error: ")]
        assert line.startswith(f"error: rank {rank} of 2 failed (exit code 1): ValueError: the nodes of this job have")
        assert " different settings: seed=1 on node 0, seed=2 on node 1; " in line
        assert ". Give all nodes the same command, " in line
        assert "threads_per_worker" not in line
    assert not (tmp_path / "two" / "metrics.jsonl").exists()
