"""Joblib's processes, which run the jobs of ``hydra/launcher=parallel``: SIGTERM asks all of their jobs to end, and
they end with the sweep, even if it is killed.

Simplification: they look every second whether it is still there. The kernel's own signal (``PR_SET_PDEATHSIG``) would
come when the *thread* that started them ends, and joblib starts some from threads that do. What they have started ends
with them, see :mod:`trainer.command.launch`. Left alone are submitit's processes, which are meant to outlive the
terminal, and jobs that the sweep runs in its own process.
"""

from __future__ import annotations

import functools
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

import psutil
from hydra.experimental.callback import Callback

from trainer.checkpoint.preemption import SECONDS_OF_ONE_REQUEST, STOP_FILE
from trainer.command import process_state, semaphores
from trainer.command.exits import JobError
from trainer.common.terminal import tell

if TYPE_CHECKING:
    from omegaconf import DictConfig

_SECONDS_BETWEEN_LOOKS = 1.0
_ENDED_BY_SIGTERM = 128 + signal.SIGTERM


class EndWithSweep(Callback):
    """Hydra callback, in the sweep's own process: joblib's processes are to begin with :func:`end_with_parent`, and
    SIGTERM goes to their jobs."""

    asked = False  # to end, by SIGTERM

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        if "joblib" not in config.hydra.launcher._target_:
            return
        from joblib import parallel  # an extra
        from joblib.externals.loky.backend import resource_tracker

        process_state.start_resource_tracker(resource_tracker.ensure_running)
        semaphores.own_names_of_loky()

        backend = functools.partial(parallel.LokyBackend, initializer=end_with_parent)
        parallel.register_parallel_backend("loky", backend)  # the one that Hydra's launcher asks for
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, _asking(Path(config.hydra.sweep.dir).absolute() / STOP_FILE))


def _asking(stop_file: Path) -> Callable[[int, FrameType | None], None]:
    """A handler for the sweep's own process. The first SIGTERM leaves ``stop_file``, so that no other job begins, and
    goes to joblib's processes; another one ends them all at once."""
    asked_at = None

    def handle(number: int, _: FrameType | None) -> None:
        nonlocal asked_at
        if asked_at is not None:
            if time.monotonic() - asked_at > SECONDS_OF_ONE_REQUEST:
                raise SystemExit(_ENDED_BY_SIGTERM)  # joblib kills its processes then
            return
        asked_at, EndWithSweep.asked = time.monotonic(), True
        tell("SIGTERM: the jobs that are running end, after a checkpoint if they save any, and no other begins")
        with suppress(OSError):
            stop_file.parent.mkdir(parents=True, exist_ok=True)
            stop_file.touch()
        for child in psutil.Process().children():
            with suppress(psutil.Error):
                if any("popen_loky" in word for word in child.cmdline()):
                    child.send_signal(number)

    return handle


@contextmanager
def job_of(sweep: Path) -> Iterator[None]:
    """One job of the sweep runs inside, in whichever process.

    Raises:
        JobError: the sweep has been asked to end; or a signal ended the job, in one of joblib's processes, which must
            not end the others' jobs by what it raises.
    """
    _Process.in_job = True
    try:
        if (sweep / STOP_FILE).exists():
            raise JobError("the sweep was asked to end before this job began")
        yield
    except SystemExit as end:
        if _Process.is_joblibs:
            raise JobError(f"the job was ended ({end.code})") from end
        raise
    finally:
        _Process.in_job = False


class _Process:
    """What this process is."""

    is_joblibs = False
    in_job = False


def end_with_parent() -> None:
    """From now on this process of :mod:`multiprocessing` is killed soon after the one that started it has ended, and
    SIGTERM ends the job that runs in it, if any, while the process remains. A launch has its own way with SIGTERM."""
    parent = multiprocessing.parent_process()
    assert parent is not None

    def watch() -> None:
        while os.getppid() == parent.pid:
            time.sleep(_SECONDS_BETWEEN_LOOKS)
        os.kill(os.getpid(), signal.SIGKILL)

    def end_job(number: int, _: FrameType | None) -> None:
        if _Process.in_job:
            raise SystemExit(_ENDED_BY_SIGTERM)

    threading.Thread(target=watch, daemon=True, name="parent").start()
    _Process.is_joblibs = True
    signal.signal(signal.SIGTERM, end_job)
