"""Signals in every phase: exit codes that say which one it was, one line and no traceback, the checkpoint that was
promised, and nothing left over."""

import fcntl
import os
import pty
import re
import signal
import subprocess
import sys
import termios
import threading
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from tests.helpers.commands import ROOT, SHORT
from tests.helpers.processes import wait_until, workers_of

RUN = (*SHORT, "algo.num_steps=3000", "hydra.run.dir=run")
SAVING = (*RUN, "checkpoint.every_steps=1")


def start_group(directory: Path, *arguments: str, **popen) -> subprocess.Popen:
    """The command in a process group of its own, as a shell starts it."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": "", "COLUMNS": "160"}
    command = [sys.executable, "-m", "trainer", *arguments]
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | popen
    return subprocess.Popen(command, cwd=directory, env=environment, text=True, start_new_session=True, **streams)


def imports_torch(process: subprocess.Popen) -> bool:
    """It has begun to load torch's libraries: seconds before anything of ours runs."""
    return "libc10" in Path(f"/proc/{process.pid}/maps").read_text()


def workers_import(process: subprocess.Popen) -> bool:
    return bool(workers_of(process))


def trains(process: subprocess.Popen) -> bool:
    return (Path(f"/proc/{process.pid}/cwd") / "run" / "metrics.jsonl").exists()


def ended(process: subprocess.Popen, number: signal.Signals, when: Callable[[subprocess.Popen], bool]) -> str:
    """Send the signal to the whole group once ``when`` holds -> stderr; nothing may be left over."""
    wait_until(lambda: when(process), process)
    family = psutil.Process(process.pid).children(recursive=True)
    os.killpg(process.pid, number)
    _, stderr = process.communicate(timeout=90)
    survivors = psutil.wait_procs(family, timeout=20)[1]
    assert [survivor for survivor in survivors if survivor.status() != psutil.STATUS_ZOMBIE] == []
    return stderr or ""


@pytest.mark.parametrize("when", [imports_torch, workers_import, trains])
def test_ctrl_c_is_130_and_one_line(tmp_path, when):
    process = start_group(tmp_path, *RUN)
    stderr = ended(process, signal.SIGINT, when)
    assert process.returncode == 130, stderr
    assert stderr == "interrupted by Ctrl-C\n"


def test_ctrl_c_ends_a_sweep_and_shows_its_jobs(tmp_path):
    process = start_group(tmp_path, "-m", *RUN, "seed=1,2", "hydra.sweep.dir=.", "hydra.sweep.subdir=run")
    stderr = ended(process, signal.SIGINT, trains)
    assert process.returncode == 130, stderr
    assert stderr == "interrupted by Ctrl-C\nerror: 1 of 1 jobs did not finish\n"


@pytest.mark.parametrize("when", [workers_import, trains])
def test_sighup_is_129_and_one_line(tmp_path, when):
    process = start_group(tmp_path, *RUN)
    stderr = ended(process, signal.SIGHUP, when)
    assert process.returncode == 129, stderr
    assert stderr.startswith("SIGHUP: ended at once, and nothing is saved")
    assert len(stderr.splitlines()) == 1


def test_a_closed_terminal_is_129(tmp_path):
    terminal, of_process = pty.openpty()
    streams = dict.fromkeys(("stdin", "stdout", "stderr"), of_process)
    process = start_group(tmp_path, *RUN, **streams, preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0))
    os.close(of_process)
    is_open = threading.Event()
    is_open.set()

    def read() -> None:
        while is_open.is_set():
            os.read(terminal, 65536)

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    wait_until(lambda: trains(process), process)
    family = psutil.Process(process.pid).children(recursive=True)
    is_open.clear()
    reader.join(timeout=30)
    os.close(terminal)
    assert process.wait(timeout=60) == 129
    assert psutil.wait_procs(family, timeout=20)[1] == []


def test_nohup_is_respected(tmp_path):
    """Torch elastic would set its own handler for SIGHUP, whatever the process was told to ignore."""
    ignoring = {"preexec_fn": lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN)}
    process = start_group(tmp_path, *SHORT, "hydra.run.dir=run", "algo.num_steps=3", **ignoring)
    wait_until(lambda: trains(process), process)
    os.killpg(process.pid, signal.SIGHUP)
    _, stderr = process.communicate(timeout=120)
    assert process.returncode == 0, stderr


@pytest.mark.parametrize("when", [workers_import, trains])
def test_sigterm_to_the_group_keeps_the_promise_and_stops_the_sweep(tmp_path, when):
    """Also while the workers still import, whom the signal would end before they know what it means."""
    process = start_group(tmp_path, "-m", *SAVING, "seed=1,2", "hydra.sweep.dir=.", "hydra.sweep.subdir=run")
    stderr = ended(process, signal.SIGTERM, when)
    assert process.returncode == 143, stderr
    saved = re.search(r"^SIGTERM: saved a checkpoint after step (\d+); the same command goes on", stderr, re.MULTILINE)
    assert saved, stderr
    assert (tmp_path / "run" / "checkpoints" / "latest").read_text() == f"step_{saved[1]}\n"
    assert not (tmp_path / "run" / "stop").exists()
    assert "error: 1 of 1 jobs did not finish" in stderr


@pytest.mark.parametrize("to_group", [True, False])
def test_sigterm_to_a_parallel_sweep_saves_all_that_run_and_begins_no_other(tmp_path, to_group):
    pytest.importorskip("joblib", reason="pip install 'torpor[joblib]'")
    arguments = ("-m", *SAVING, "seed=1,2,3", "hydra/launcher=parallel", "hydra.sweep.dir=sweep")
    process, sweep = start_group(tmp_path, *arguments), tmp_path / "sweep"
    wait_until(lambda: all((sweep / job / "metrics.jsonl").exists() for job in "01"), process)
    family = psutil.Process(process.pid).children(recursive=True)
    if to_group:
        os.killpg(process.pid, signal.SIGTERM)
    else:
        process.send_signal(signal.SIGTERM)
    stdout, stderr = process.communicate(timeout=120)
    assert process.returncode == 143, stderr
    assert psutil.wait_procs(family, timeout=20)[1] == []
    for job in "01":
        saved = re.search(rf"^job {job} failed: SIGTERM: saved a checkpoint after step (\d+); ", stdout, re.MULTILINE)
        assert saved, stdout
        assert (sweep / job / "checkpoints" / "latest").read_text() == f"step_{saved[1]}\n"
    assert not (sweep / "2" / "config.json").exists()
    assert not (sweep / "stop").exists()
    assert "Traceback" not in stderr


def semaphores() -> set[str]:
    return {name for name in os.listdir("/dev/shm") if name.startswith("sem.torpor-")}


def test_what_a_killed_group_leaves_the_next_start_clears(tmp_path):
    process = start_group(tmp_path, *RUN)
    wait_until(lambda: workers_import(process), process)
    own = {name for name in semaphores() if f"-{process.pid}-" in name}
    assert len(own) >= 5
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    assert own <= semaphores()
    again = start_group(tmp_path, *SHORT, "hydra.run.dir=another")
    _, stderr = again.communicate(timeout=200)
    assert again.returncode == 0, stderr
    assert own & semaphores() == set()
