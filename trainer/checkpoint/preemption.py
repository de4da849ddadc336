"""SIGTERM as a request: schedulers send it before they take a machine away, to one process or to all of a job.

Whoever gets it leaves a file; after each step rank 0 looks for that file, and all ranks save and end. Simplification: a
step is not cut short, so the scheduler must grant the seconds of a step and a checkpoint.
"""

import os
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import FrameType

STOP_FILE = "stop"  # in the run directory
SECONDS_OF_ONE_REQUEST = 1.0  # it may come twice: to the process group and, passed on, to the process


def request_handler(stop_file: Path, second: Callable[[int, FrameType | None], object]) -> Callable:
    """The launching process's handler: the first SIGTERM leaves the file, one that comes later is up to ``second``. The
    file is no sign of a first one: where all processes of the job get the signal, a worker may have left it just
    before."""
    asked_at = None

    def handle(number: int, frame: FrameType | None) -> None:
        nonlocal asked_at
        if asked_at is not None:
            if time.monotonic() - asked_at > SECONDS_OF_ONE_REQUEST:
                second(number, frame)
            return
        asked_at = time.monotonic()
        try:
            stop_file.touch()
        except OSError:  # a full disk, or a folder that is gone: nobody would learn of the request
            second(number, frame)
            return
        message = "SIGTERM: saving a checkpoint after the current step (another SIGTERM ends the job at once)\n"
        with suppress(OSError):  # of a terminal that was closed
            os.write(2, message.encode())

    return handle


def watch(stop_file: Path, *, parent: int) -> None:
    """In a worker, before it has other threads: SIGTERM leaves the file, unless it is from the parent.

    The parent's means that the job has failed. It ends this process even while the main thread is inside a collective,
    where a Python handler would wait for the call to return.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})

    def wait() -> None:
        while signal.sigwaitinfo({signal.SIGTERM}).si_pid != parent:
            with suppress(OSError):
                stop_file.touch()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=wait, daemon=True, name="SIGTERM").start()
