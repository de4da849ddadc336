"""A launch ends with rank 0's result or with the right rank blamed, and never with a process left over."""

import json
import logging
import multiprocessing
import multiprocessing.context
import os
import pickle
import pty
import signal
import subprocess
import sys
import tempfile
import time
from multiprocessing import resource_tracker
from pathlib import Path

import psutil
import pytest

from tests.helpers import launch_targets
from trainer.command.launch import WorkerError, launch

ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "CUDA_VISIBLE_DEVICES": "",
    "PYTHONHASHSEED": "0",
    "TORPOR_TEST": "here",
}


def process_state() -> dict:
    """Everything in this process that a launch may touch."""
    signals = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
    elastic = logging.getLogger("torch.distributed.elastic")
    return {
        "environment": dict(os.environ),
        "handlers": [signal.getsignal(number) for number in signals],
        "start_method": multiprocessing.get_start_method(allow_none=True),
        "elastic_logger": (list(elastic.handlers), elastic.propagate),
        "children": multiprocessing.active_children(),
    }


def start_program(worker: str, payload: dict, log_dir: Path, **popen) -> subprocess.Popen:
    command = [sys.executable, launch_targets.__file__, worker, json.dumps(payload), str(log_dir)]
    root = str(Path(launch_targets.__file__).parents[2])
    return subprocess.Popen(command, cwd=root, env=os.environ | {"PYTHONPATH": root}, **popen)


def test_rank_0_result_and_this_process_as_before(tmp_path, monkeypatch, capfd):
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    before = process_state()

    result = launch(
        launch_targets.describe_start, {"a": 1}, nproc=2, log_dir=tmp_path / "logs", environment=ENVIRONMENT
    )

    assert result == {
        "total": 3.0,
        "rank": 0,
        "terminal": False,
        "hash_randomization": 0,  # PYTHONHASHSEED=0 came before the interpreter started, as LD_PRELOAD must
        "marker": "here",
        "searches_garbage": True,
        "passed_by": True,  # what importing the worker made is not searched
        "payload": {"a": 1},
    }
    assert process_state() == before
    tracker_environment = Path(f"/proc/{resource_tracker._resource_tracker._pid}/environ").read_text()
    assert "TORPOR_TEST" not in tracker_environment
    assert list(temporary.iterdir()) == []
    shown = capfd.readouterr()
    assert shown.out == "stdout of rank 0\n"
    assert shown.err == "[rank0]:stderr of rank 0\n"
    assert (tmp_path / "logs" / "rank_1.log").read_text() == "stdout of rank 1\nstderr of rank 1\n"


def test_a_failure_is_the_only_thing_shown(tmp_path):
    program = start_program(
        "fail",
        {"how": "raise", "rank": 1},
        tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    stdout, stderr = program.communicate(timeout=60)
    assert program.returncode == 1
    assert stdout == ""
    assert stderr == (
        "rank 1 of 2 failed (exit code 1): LookupError: no such bear\n"
        f"  traceback: {tmp_path}/rank_1.traceback\n  log: {tmp_path}/rank_1.log\n"
    )
    assert "signal SIGTERM" in (tmp_path / "elastic_0.log").read_text()


def test_an_exception_is_blamed_and_the_next_job_runs(tmp_path, monkeypatch):
    """Under joblib's start method, which spawned children do not know."""

    class LokyContext(multiprocessing.context.SpawnContext):
        _name = "loky"

    monkeypatch.setitem(multiprocessing.context._concrete_contexts, "loky", LokyContext())
    monkeypatch.setattr(
        multiprocessing.context._default_context, "_actual_context", multiprocessing.get_context("loky")
    )
    before = process_state()
    assert before["start_method"] == "loky"

    with pytest.raises(WorkerError) as caught:
        launch(
            launch_targets.fail,
            {"how": "raise", "rank": 1},
            nproc=2,
            log_dir=tmp_path,
            environment=ENVIRONMENT,
        )

    assert str(caught.value).startswith("rank 1 of 2 failed (exit code 1): LookupError: no such bear\n")
    assert pickle.loads(pickle.dumps(caught.value)).args == caught.value.args
    assert caught.value.__context__ is None
    written = (tmp_path / "rank_1.traceback").read_text()
    assert "raise LookupError" in written
    assert "second line" in written
    assert process_state() == before

    result = launch(launch_targets.describe_start, {}, nproc=1, log_dir=tmp_path, environment=ENVIRONMENT)
    assert result["total"] == 1.0
    assert not (tmp_path / "rank_1.traceback").exists()


@pytest.mark.parametrize(
    ("how", "rank", "blame"),
    [
        ("os._exit", 1, "rank 1 of 2 ended with exit code 7 and no Python exception"),
        ("SIGKILL", 1, "rank 1 of 2 was killed by signal 9 (SIGKILL)"),
        ("full disk", 1, "rank 1 of 2 ended with exit code 1 and no Python exception"),
        ("SystemExit", 0, "rank 0 of 2 failed (exit code 1): SystemExit: 0"),
    ],
)
def test_sudden_ends_are_blamed_on_the_rank_that_ended(tmp_path, how, rank, blame):
    with pytest.raises(WorkerError) as caught:
        launch(
            launch_targets.fail,
            {"how": how, "rank": rank},
            nproc=2,
            log_dir=tmp_path,
            environment=ENVIRONMENT,
        )
    assert str(caught.value).startswith(blame)
    assert f"log: {tmp_path}/rank_{rank}.log" in str(caught.value)


@pytest.mark.parametrize(
    ("number", "exit_code"),
    [
        (signal.SIGINT, -signal.SIGINT),  # Python ends so after a KeyboardInterrupt that nobody caught
        (signal.SIGTERM, 128 + signal.SIGTERM),
        (signal.SIGKILL, -signal.SIGKILL),
    ],
)
def test_ending_the_parent_leaves_no_survivors(tmp_path, number, exit_code):
    pids = tmp_path / "pids"
    pids.mkdir()
    program = start_program("wait_for_ever", {"pids": str(pids)}, tmp_path / "logs", stderr=subprocess.PIPE)
    deadline = time.monotonic() + 60
    while len(list(pids.iterdir())) < 2 and time.monotonic() < deadline:
        time.sleep(0.05)
    workers = [psutil.Process(int(path.name)) for path in pids.iterdir()]
    assert len(workers) == 2
    time.sleep(0.3)  # rank 1 is in its C++ call by now

    program.send_signal(number)
    stderr = program.communicate(timeout=20)[1].decode()

    assert program.returncode == exit_code
    assert psutil.wait_procs(workers, timeout=5)[1] == []
    assert ("KeyboardInterrupt" in stderr) == (number == signal.SIGINT)
    assert "SignalException" not in stderr


def test_two_launches_at_once_and_rank_0_sees_the_terminal(tmp_path):
    terminal, terminal_of_program = pty.openpty()
    with_terminal = start_program("describe_start", {}, tmp_path / "a", stdout=terminal_of_program)
    without = start_program("describe_start", {}, tmp_path / "b", stdout=subprocess.PIPE, text=True)
    os.close(terminal_of_program)

    output = [without.communicate(timeout=60)[0]]
    assert with_terminal.wait(timeout=60) == 0
    output.append(os.read(terminal, 100_000).decode())
    os.close(terminal)

    results = [json.loads(text.split("RESULT ")[1].splitlines()[0]) for text in output]
    assert [result["total"] for result in results] == [3.0, 3.0]
    assert [result["terminal"] for result in results] == [False, True]
