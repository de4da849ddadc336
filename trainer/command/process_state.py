"""What a launch changes in this process for a while: environment, signal handlers, start method, loggers, children."""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

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
        if threading.current_thread() is threading.main_thread():  # elastic sets handlers only there
            for number in SIGNALS:
                undone.callback(signal.signal, number, signal.getsignal(number))
        log = undone.enter_context(_log(elastic_log))

        os.environ.update(environment)
        multiprocessing.set_start_method("spawn", force=True)  # told to the children, who know no "loky" (joblib)
        for name in _ELASTIC_LOGGERS:
            logger = logging.getLogger(name)
            logger.addHandler(log)
            undone.callback(logger.removeHandler, log)
            logger.propagate = False
        yield


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
