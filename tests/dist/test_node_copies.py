"""One copy of every weights tag on a node (``memory.tags=node``): counted once, in order, gone with its processes."""

import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.helpers.node_copies_worker import run_checks
from trainer.command.launch import launch
from trainer.command.launch_environment import worker_environment

PAGE = os.sysconf("SC_PAGESIZE")
MIB = 2**20


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    environment = worker_environment(platform="cpu", sleeps=True, threads_per_worker=1)
    results = {}
    for ranks in (2, 4):
        log_dir = tmp_path_factory.mktemp("logs")
        results |= launch(run_checks, None, nproc=ranks, log_dir=log_dir, environment=environment)
    return results


@pytest.mark.parametrize(
    ("case", "sets"),
    [
        *(("dp", [[0, 1]]), ("plain", [[0, 1]]), ("nodes", [[0, 1], [2, 3]])),
        *(("tp", [[0, 2], [1, 3]]), ("experts", [[0, 2], [1, 3]])),
    ],
)
def test_the_memory_behind_two_tags_is_what_the_plan_counts_and_that_of_the_ranks_that_hold_the_same(case, sets, found):
    ranks = found[case]
    inodes = [set(rank["measured"]) for rank in ranks]
    for group in sets:
        assert len(inodes[group[0]]) == 2
        assert all(inodes[rank] == inodes[group[0]] for rank in group)
    assert len(set.union(*inodes)) == 2 * len(sets)
    for rank in ranks:
        size, pss = (sum(amounts) for amounts in zip(*rank["measured"].values(), strict=True))
        assert 400_000 < 2 * rank["planned"] <= size < 2 * rank["planned"] + 4 * PAGE
        assert pss == pytest.approx(rank["planned"], abs=4 * PAGE)


@pytest.mark.parametrize("case", ["dp", "plain", "tp", "nodes", "experts"])
def test_every_rank_gets_both_tags_back(case, found):
    for rank in found[case]:
        assert rank["restored"] == [True, True]
        assert rank["same"]


def test_a_restore_waits_for_the_slowest_backup(found):
    assert found["late writer"] == [[2.0], [2.0]]


def test_a_backup_waits_for_the_slowest_restore(found):
    assert found["late reader"] == [[1.0], [1.0]]


def test_a_tag_that_moves_to_the_device_and_back_keeps_its_bytes(found):
    whole = 4032 + 64
    for rank in found["moves"]:
        assert rank["found"] == [3.0, 3.0]
        assert rank["host_bytes"] == [whole // 2, 0, whole // 2, whole // 2]


def test_ranks_that_measure_other_room_move_their_tags_together(found):
    one, other = found["apart"]
    assert one == other
    assert one["reserves"] == {2_750_000}
    assert (one["before"], one["after"]) == ({"actor", "ref"}, set())


def test_shared_memory_has_no_name_and_is_gone_when_its_processes_are_killed(tmp_path):
    """On a machine where other tests share far less memory than this."""
    size, root, names = 256 * MIB, Path(__file__).parents[2], set(os.listdir("/dev/shm"))
    before = psutil.virtual_memory().shared
    command = [sys.executable, "-m", "tests.helpers.node_copies_worker"]
    workers = [
        subprocess.Popen([*command, str(r), str(tmp_path / "store"), str(size)], stdout=subprocess.PIPE, cwd=root)
        for r in range(2)
    ]
    try:
        for worker in workers:
            assert worker.stdout is not None
            assert worker.stdout.readline() == b"holds\n"
        assert psutil.virtual_memory().shared - before > 0.9 * size
        assert not [name for name in set(os.listdir("/dev/shm")) - names if "torpor" in name]
    finally:
        for worker in workers:
            worker.kill()
            worker.wait()
            assert worker.stdout is not None
            worker.stdout.close()
    deadline = time.monotonic() + 10
    while psutil.virtual_memory().shared - before > 0.1 * size:
        assert time.monotonic() < deadline
        time.sleep(0.1)
