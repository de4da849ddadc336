"""Whose job a folder holds: the same command goes on anywhere, another command is told what differs."""

import os

import pytest

from tests.helpers.composing import SMALL, composed
from trainer.command import jobs
from trainer.config import compose as configuration
from trainer.config.schema import Config

ANY_THREADS = [override for override in SMALL if "threads_per_worker" not in override]


def of_command(directory, *overrides: str) -> Config:
    """The config with which the command runs in this directory."""
    given = composed(*ANY_THREADS, *overrides)
    open_settings = configuration.left_to_the_machine(given)
    return jobs.as_begun(configuration.to_config(given), directory, left_open=open_settings)


@pytest.fixture
def cores(monkeypatch):
    """Sets the number of cores that this process may use."""

    def set_cores(count: int) -> None:
        monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(count)))

    return set_cores


def test_a_run_keeps_its_threads_on_a_machine_with_other_cores(tmp_path, cores):
    cores(3)
    begun = of_command(tmp_path)
    assert begun.launch.threads_per_worker == 3
    jobs.claim(tmp_path, begun, None)
    for count in (1, 64):
        cores(count)
        again = of_command(tmp_path)
        assert again == begun
        assert jobs.finished(tmp_path, again) is None
        assert of_command(tmp_path / "another").launch.threads_per_worker == count
    assert of_command(tmp_path, "launch.nnodes=2").launch.threads_per_worker == 64  # each node has its own number


def test_threads_that_a_command_gives_are_its_own(tmp_path, cores):
    cores(3)
    jobs.claim(tmp_path, of_command(tmp_path), None)
    given = of_command(tmp_path, "launch.threads_per_worker=2")
    assert given.launch.threads_per_worker == 2
    with pytest.raises(ValueError, match=r"go on .*\(launch\.threads_per_worker=2 where that has 3\)"):
        jobs.finished(tmp_path, given)
    cores(1)
    assert jobs.finished(tmp_path, of_command(tmp_path, "launch.threads_per_worker=3")) is None


def test_another_command_is_told_what_differs(tmp_path):
    jobs.claim(tmp_path, of_command(tmp_path), None)
    others = ("tags=[x]", "objective=[host_bytes]", "rollout.top_p=0.5")
    with pytest.raises(ValueError, match="holds a run of another config") as caught:
        jobs.finished(tmp_path, of_command(tmp_path, "seed=2", *others))
    for setting in ("seed=2 where that has 1", "tags=['x'] where that has []", "rollout.top_p=0.5 where that has 1.0"):
        assert setting in str(caught.value)
    with pytest.raises(ValueError, match=r"algo\.epochs=2 where that has 1\)$"):
        jobs.finished(tmp_path, of_command(tmp_path, "algo.epochs=2", "objective=[host_bytes]"))
    with pytest.raises(ValueError, match=r", and \d+ more\)$"):
        jobs.finished(tmp_path, of_command(tmp_path, "model.layers=4", "model.heads=2", "model.kv_heads=1"))
