"""SIGTERM in the launching process: asked once the job ends after its step, asked again at once."""

import signal
import time

from trainer.checkpoint.preemption import request_handler


def test_the_first_signal_asks_and_the_second_ends(tmp_path, capfd, monkeypatch):
    """One that comes within a second is the same request: to the process group, and passed on to the process."""
    clock, ended = [100.0], []
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    handle = request_handler(tmp_path / "stop", lambda number, frame: ended.append(number))
    handle(signal.SIGTERM, None)
    assert (tmp_path / "stop").exists()
    assert ended == []
    assert "saving a checkpoint after the current step" in capfd.readouterr().err
    for seconds, expected in ((100.0, []), (100.9, []), (101.1, [signal.SIGTERM])):
        clock[0] = seconds
        handle(signal.SIGTERM, None)
        assert ended == expected


def test_a_request_that_nobody_could_read_ends_the_job(tmp_path):
    """The run directory was deleted."""
    ended = []
    handle = request_handler(tmp_path / "gone" / "stop", lambda number, frame: ended.append(number))
    handle(signal.SIGTERM, None)
    assert ended == [signal.SIGTERM]


def test_a_worker_that_got_the_signal_first_does_not_make_it_a_second_one(tmp_path):
    ended = []
    (tmp_path / "stop").touch()
    handle = request_handler(tmp_path / "stop", lambda number, frame: ended.append(number))
    handle(signal.SIGTERM, None)
    assert ended == []
