"""What a launch changes in this process for a while: environment, signal handlers, start method, loggers, children."""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from multiprocessing import resource_tracker
from pathlib import Path

from trainer.command import semaphores

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)  # for which elastic sets handlers
_ELASTIC_LOGGERS = ("torch.distributed.elastic", "torch.distributed.launcher", "torch.multiprocessing")


@contextmanager
def kept(environment: Mapping[str, str], *, elastic_log: Path) -> Iterator[None]:
    """Set what a launch needs in this process; then undo that, and what elastic changed and left behind."""
    with ExitStack() as undone:  # all of it, even if undoing one thing fails
        undone.callback(_restore_environment, dict(os.environ))
        undone.callback(multiprocessing.set_start_method, multiprocessing.get_start_method(allow_none=True), force=True)
        for name in _ELASTIC_LOGGERS:
            undone.callback(setattr, logging.getLogger(name), "propagate", logging.getLogger(name).propagate)
        undone.callback(_end_children, set(multiprocessing.active_children()))
        undone.enter_context(semaphores.own_names())
        if threading.current_thread() is threading.main_thread():  # elastic sets handlers only there
            for number in SIGNALS:
                undone.callback(signal.signal, number, signal.getsignal(number))
            undone.enter_context(_waiting_in_workers())
        log = undone.enter_context(_log(elastic_log))

        os.environ.update(environment)
        multiprocessing.set_start_method("spawn", force=True)  # told to the children, who know no "loky" (joblib)
        for name in _ELASTIC_LOGGERS:
            logger = logging.getLogger(name)
            logger.addHandler(log)
            undone.callback(logger.removeHandler, log)
            logger.propagate = False
        yield


def start_resource_tracker(ensure_running: Callable[[], object] = resource_tracker.ensure_running) -> None:
    """Start Python's own process that removes semaphores which nobody has any more, or joblib's. It outlives launches
    and knows to ignore SIGINT and SIGTERM; a closed terminal must not end it before it has cleared up either."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGHUP, signal.SIGQUIT})
    try:
        ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def handled_signals() -> list[signal.Signals]:
    """Of :data:`SIGNALS` those that this process has not been told to ignore, as nohup tells of SIGHUP."""
    return [number for number in SIGNALS if signal.getsignal(number) != signal.SIG_IGN]


@contextmanager
def _waiting_in_workers() -> Iterator[None]:
    """Workers start with :data:`SIGNALS` blocked: one that comes before they know what to do with it waits until
    :func:`trainer.command.launch._run_worker` does. They inherit that from the thread that starts them, this one. A
    thread beside it takes the process's own signals; Python runs their handlers in the main thread all the same."""
    ready, over = threading.Event(), threading.Event()

    def take() -> None:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
        ready.set()
        over.wait()

    thread = threading.Thread(target=take, daemon=True, name="signals")
    thread.start()
    ready.wait()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        over.set()
        thread.join()


class _Log(logging.FileHandler):
    """A log that nobody misses when the disk is full or the folder gone: no run may end for its sake."""

    def emit(self, record: logging.LogRecord) -> None:
        with suppress(OSError):  # from opening the file; what writing raises goes to handleError
            super().emit(record)

    def handleError(self, record: logging.LogRecord) -> None:
        pass


@contextmanager
def _log(path: Path) -> Iterator[_Log]:
    log = _Log(path, mode="w", delay=True)
    try:
        yield log
    finally:
        with suppress(OSError):  # closing writes what could not be written before
            log.close()


def _restore_environment(variables: Mapping[str, str]) -> None:
    for name in os.environ.keys() - variables.keys():
        del os.environ[name]
    os.environ.update(variables)


def _end_children(bystanders: set) -> None:
    for process in set(multiprocessing.active_children()) - bystanders:
        process.kill()
        process.join()
