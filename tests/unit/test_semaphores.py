"""Semaphores of launches that were killed with all of their processes go with the next launch; others stay."""

import multiprocessing
import os
import subprocess
import sys
from pathlib import Path

import pytest

from trainer.command import semaphores

ROOT = Path(__file__).parents[2]
OF_LOKY = (
    "from joblib.externals.loky.backend.context import get_context; from trainer.command import semaphores\n"
    "semaphores.own_names_of_loky()\n"
    "kept = [get_context('loky').SimpleQueue(), get_context('loky').Event()]\n"
    "print('made', flush=True)\n"
    "input()\n"
)
OF_ELASTIC = (
    "import multiprocessing, os, signal; from trainer.command import semaphores\n"
    "context = multiprocessing.get_context('spawn')\n"
    "with semaphores.own_names():\n"
    "    kept = [context.SimpleQueue(), context.Event()]\n"
    "    print('made', flush=True)\n"
    "    input()\n"
)


def left_by(pid: int) -> list[str]:
    return [name for name in os.listdir("/dev/shm") if f"-{pid}-" in name]


@pytest.mark.parametrize("program", [OF_ELASTIC, OF_LOKY], ids=["elastic", "loky"])
def test_those_of_a_process_that_is_gone_are_removed_and_those_of_one_that_lives_are_not(program):
    if program == OF_LOKY:
        pytest.importorskip("joblib", reason="pip install 'torpor[joblib]'")
    command, pipe = [sys.executable, "-c", program], subprocess.PIPE
    living, killed = (
        subprocess.Popen(command, cwd=ROOT, stdin=pipe, stdout=pipe, text=True, start_new_session=True)
        for _ in range(2)
    )
    for process in (living, killed):
        assert process.stdout is not None
        assert process.stdout.readline() == "made\n"
    assert len(left_by(living.pid)) == len(left_by(killed.pid)) >= 5
    os.killpg(killed.pid, 9)  # with the process of Python's that would have removed them
    killed.wait()
    assert left_by(killed.pid)
    with semaphores.own_names():
        assert left_by(killed.pid) == []
        assert left_by(living.pid)
    living.communicate("\n", timeout=30)
    assert left_by(living.pid) == []


def test_a_number_that_was_given_to_another_process_does_not_save_them():
    name = f"/dev/shm/sem.torpor-{semaphores._namespace()}-{os.getpid()}-1-abc"
    Path(name).touch()
    foreign = Path(f"/dev/shm/sem.torpor-00000000-{os.getpid()}-1-abc")
    foreign.touch()
    try:
        semaphores.clear()
        assert not Path(name).exists()
        assert foreign.exists()  # of another container
    finally:
        foreign.unlink()


def test_names_are_the_processes_own_only_inside():
    before = multiprocessing.get_context("spawn").Lock()._semlock.name
    with semaphores.own_names():
        inside = multiprocessing.get_context("spawn").Lock()._semlock.name
    assert f"-{os.getpid()}-" in inside
    assert "torpor" not in before
    assert multiprocessing.current_process()._config["semprefix"] == "/mp"
