"""SIGTERM in the launching process: asked once the job ends after its step, asked twice at once."""

import signal

from trainer.checkpoint.preemption import request_handler


def test_the_first_signal_asks_and_the_second_ends(tmp_path, capfd):
    ended = []
    handle = request_handler(tmp_path / "stop", lambda number, frame: ended.append(number))
    handle(signal.SIGTERM, None)
    assert (tmp_path / "stop").exists()
    assert ended == []
    assert "saving a checkpoint after the current step" in capfd.readouterr().err
    handle(signal.SIGTERM, None)
    assert ended == [signal.SIGTERM]


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
