"""Start the workers of one job and turn their end into rank 0's result or into one clear error.

Simplifies torch elastic (``torch.distributed.launcher.api.elastic_launch``, the library form of torchrun).
Around it: this process is left as it was (environment, signal handlers, start method, loggers, no surviving
child), the rank that failed first is the one blamed, and errors can be pickled. The only module that writes
``os.environ``.

Files in ``log_dir``: ``rank_<n>.log`` (stderr and, of all ranks but 0, stdout), ``rank_<n>.traceback`` (of a
rank that raised: the error in one line, then the traceback), ``elastic.log`` (torch elastic's own warnings).
"""

import logging
import multiprocessing
import os
import pickle
import signal
import sys
import threading
import time
import traceback
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any, NoReturn

import rich
from torch import distributed
from torch.distributed.elastic.multiprocessing import LogsDest, LogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

# A rank that raised stays connected this long: its peers fail after it, not with it, and a peer whose sudden
# death made it raise is seen by elastic, which looks every 0.1 s, before it is.
_SECONDS_BETWEEN_RAISE_AND_EXIT = 1.0
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)  # for which elastic sets handlers
_ELASTIC_LOGGERS = ("torch.distributed.elastic", "torch.distributed.launcher", "torch.multiprocessing")


class WorkerError(RuntimeError):
    """A worker failed. One string: which rank, how it ended, its error in one line, where to read more."""


def launch(
    worker: Callable[[Any], dict], payload: Any, *, nproc: int, log_dir: Path, environment: Mapping[str, str]
) -> dict:
    """Run ``worker(payload)`` in ``nproc`` fresh processes on this machine and return what rank 0 returned.

    ``worker`` is importable by name; ``payload`` and rank 0's result can be pickled. Workers find ``RANK``,
    ``LOCAL_RANK``, ``WORLD_SIZE``, ``MASTER_ADDR`` and ``MASTER_PORT`` as torchrun sets them, and
    ``environment`` from their interpreter's start on. Rank 0's stdout is this process's own, so that it sees
    whether that is a terminal; its stderr is logged and shown. On success open process groups are closed.

    Raises WorkerError for the rank that failed first; KeyboardInterrupt on SIGINT, SystemExit(128 + n) on
    SIGTERM, SIGHUP or SIGQUIT, once all workers have ended. When this process is killed, the workers end too.
    """
    assert nproc >= 1, nproc
    log_dir = log_dir.resolve()
    log_dir.mkdir(parents=True, exist_ok=True)
    for stale in log_dir.glob("rank_*"):
        stale.unlink()
    arguments = pickle.dumps((worker, payload)), log_dir
    resource_tracker.ensure_running()  # it outlives the launch, so it starts without `environment`
    try:
        with _process_state_kept(environment, elastic_log=log_dir / "elastic.log"):
            config = LaunchConfig(
                min_nodes=1,
                max_nodes=1,
                nproc_per_node=nproc,
                max_restarts=0,
                start_method="spawn",  # fork and forkserver would not see LD_PRELOAD
                run_id=uuid.uuid4().hex,
                rdzv_backend="c10d",
                rdzv_endpoint="127.0.0.1:0",
                local_addr="127.0.0.1",
                role="rank",  # lines of rank 0's stderr are shown as "[rank0]:..."
                logs_specs=_FlatLogs(str(log_dir)),
            )
            results = elastic_launch(config, _run_worker)(*arguments)
        return pickle.loads(results[0])
    except ChildFailedError as error:
        failure = WorkerError(_describe(error, nproc=nproc, log_dir=log_dir))
    except SignalException as error:  # an Exception: a sweep would count it as a failed job and go on
        failure = KeyboardInterrupt() if error.sigval == signal.SIGINT else SystemExit(128 + error.sigval)
    finally:
        rich.get_console().show_cursor()  # a rank 0 that was killed inside a progress display left it hidden
    raise failure  # here, where it has no context that keeps elastic's semaphores alive


class _FlatLogs(LogsSpecs):
    """One log file per rank, directly in the folder; rank 0's is followed on the terminal."""

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        logs = {rank: str(_log_path(Path(self.root_log_dir), rank)) for rank in envs}
        return LogsDest(
            stdouts=dict.fromkeys(envs, ""),  # not redirected
            stderrs=logs,
            tee_stderrs={0: logs[0]},
            error_files=dict.fromkeys(envs, os.devnull),  # their times are whole seconds: we write our own
        )

    @property
    def root_log_dir(self) -> str:
        return str(self._root_log_dir)


def _log_path(log_dir: Path, rank: int) -> Path:
    return log_dir / f"rank_{rank}.log"


def _traceback_path(log_dir: Path, rank: int) -> Path:
    return log_dir / f"rank_{rank}.traceback"


def _run_worker(pickled: bytes, log_dir: Path) -> bytes:
    """What elastic runs in every worker. Returns rank 0's result, and None of the others, pickled."""
    # Ctrl-C and the parent's death (torch asks the kernel to tell us) both arrive as SIGINT. The default
    # action ends a worker even inside a collective, where Python's handler would wait for the call to return.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    parent = multiprocessing.parent_process()
    if parent is None or os.getppid() != parent.pid:
        os._exit(1)  # the parent died before torch had asked
    rank = int(os.environ["RANK"])
    if rank != 0:
        os.dup2(2, 1)
        sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    try:
        worker, payload = pickle.loads(pickled)  # here and not by elastic: what importing it prints is logged
        result = worker(payload)
        assert isinstance(result, dict), f"the worker returned {type(result).__name__}, not a dict"
        returned = pickle.dumps(result if rank == 0 else None)
        if distributed.is_initialized():
            distributed.destroy_process_group()  # on failure it would make the peers fail first
    except BaseException as error:  # SystemExit too, which elastic takes for success when its code is 0
        _record_and_exit(error, _traceback_path(log_dir, rank))
    return returned


def _record_and_exit(error: BaseException, path: Path) -> NoReturn:
    """Write the error down, then end without finalizers, which can hang on a broken process group."""
    summary = f"{type(error).__name__}: {error}".splitlines()[0]
    text = "\n".join([summary, "", *traceback.format_exception(error)])
    path.write_text(text, encoding="utf-8", errors="backslashreplace")
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    time.sleep(_SECONDS_BETWEEN_RAISE_AND_EXIT)
    os._exit(1)


def _describe(error: ChildFailedError, *, nproc: int, log_dir: Path) -> str:
    """Blame the rank that elastic saw die or, if that one raised, the rank that raised first."""
    rank, failure = error.get_first_failure()
    tracebacks = {r: path for r in range(nproc) if (path := _traceback_path(log_dir, r)).exists()}
    if rank in tracebacks:
        rank, path = min(tracebacks.items(), key=lambda item: item[1].stat().st_mtime_ns)
        end = f"failed (exit code 1): {_lines(path)[0]}\n  traceback: {path}"
        return f"rank {rank} of {nproc} {end}\n  log: {_log_path(log_dir, rank)}"
    if failure.exitcode < 0:
        end = f"was killed by signal {-failure.exitcode} ({failure.signal_name()})"
        if failure.exitcode == -signal.SIGKILL:
            end += ", often the system running out of host memory"
    else:
        end = f"ended with exit code {failure.exitcode} and no Python exception"
    path = _log_path(log_dir, rank)
    last_line = (_lines(path) or ["(nothing)"])[-1]
    return f"rank {rank} of {nproc} {end}\n  last line of its log: {last_line}\n  log: {path}"


def _lines(path: Path) -> list[str]:
    """The lines of a file that are not blank; none if it was never written."""
    text = path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""
    return [line for line in text.splitlines() if line.strip()]


@contextmanager
def _process_state_kept(environment: Mapping[str, str], *, elastic_log: Path) -> Iterator[None]:
    """Set what a launch needs in this process; then undo that, and what elastic changed and left behind."""
    variables = dict(os.environ)
    start_method = multiprocessing.get_start_method(allow_none=True)
    in_main_thread = threading.current_thread() is threading.main_thread()  # it sets them only there
    handlers = {number: signal.getsignal(number) for number in _SIGNALS if in_main_thread}
    bystanders = set(multiprocessing.active_children())
    loggers = [logging.getLogger(name) for name in _ELASTIC_LOGGERS]
    propagate = [logger.propagate for logger in loggers]
    log_handler = logging.FileHandler(elastic_log, mode="w", delay=True)

    os.environ.update(environment)
    multiprocessing.set_start_method("spawn", force=True)  # told to the children, who know no "loky" (joblib)
    for logger in loggers:
        logger.addHandler(log_handler)
        logger.propagate = False
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        for process in set(multiprocessing.active_children()) - bystanders:
            process.kill()
            process.join()
        for logger, propagated in zip(loggers, propagate, strict=True):
            logger.removeHandler(log_handler)
            logger.propagate = propagated
        log_handler.close()
        multiprocessing.set_start_method(start_method, force=True)
        for name in os.environ.keys() - variables.keys():
            del os.environ[name]
        os.environ.update(variables)
