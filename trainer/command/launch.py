"""Start the workers of one job and turn their end into rank 0's result or into one clear error.

Simplifies torch elastic (``torch.distributed.launcher.api.elastic_launch``, the library form of torchrun).
Around it: this process is left as it was (environment, signal handlers, start method, loggers, no surviving
child; :mod:`trainer.command.process_state`), the rank that failed first is the one blamed, and errors can be pickled.

Files in ``log_dir``: ``rank_<n>.log`` (stderr and, of all ranks but 0, stdout), ``rank_<n>.traceback`` (of a
rank that raised: the error in one line, then the traceback), ``elastic_<node>.log`` (torch elastic's own warnings).
"""

import logging
import multiprocessing
import os
import pickle
import re
import shutil
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

import rich
from torch import distributed
from torch.distributed.elastic.multiprocessing import LogsDest, LogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous import RendezvousError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from trainer.checkpoint import preemption
from trainer.command import process_state, rendezvous
from trainer.command.nodes import Nodes
from trainer.common import garbage

# A rank that raised stays connected this long: its peers fail after it, not with it, and a peer whose sudden
# death made it raise is seen by elastic, which looks every 0.1 s, before it is.
_SECONDS_BETWEEN_RAISE_AND_EXIT = 1.0
_FULL_DISK_BYTES = 2**20  # with less than this free a worker's error may not have been written
_ONE_NODE = Nodes()


class WorkerError(RuntimeError):
    """A worker failed, or none could start. One string: which rank, how it ended, its error in one line, where to read
    more."""


def launch(
    worker: Callable[[Any], dict],
    payload: Any,
    *,
    nproc: int,
    log_dir: Path,
    environment: Mapping[str, str],
    nodes: Nodes = _ONE_NODE,
    stop_file: Path | None = None,
) -> dict:
    """Run ``worker(payload)`` in ``nproc`` fresh processes on this node and return what the first of them returned,
    which on one node is rank 0.

    ``worker`` is importable by name; ``payload`` and the result can be pickled. Workers find ``RANK``,
    ``LOCAL_RANK``, ``WORLD_SIZE``, ``MASTER_ADDR`` and ``MASTER_PORT`` as torchrun sets them, and
    ``environment`` from their interpreter's start on. Rank 0's stdout is this process's own, so that it sees
    whether that is a terminal; its stderr is logged and shown. On success open process groups are closed.

    Raises WorkerError for the rank that failed first; KeyboardInterrupt on SIGINT, SystemExit(128 + n) on
    SIGTERM, SIGHUP or SIGQUIT, once all workers have ended. When this process is killed, the workers end too.
    With ``stop_file`` the first SIGTERM, whoever gets it, only leaves that file, see
    :mod:`trainer.checkpoint.preemption`.
    With several nodes each runs this function; all of them fail once one does.
    """
    assert nproc >= 1, nproc
    if nodes.count == 1:
        environment = {**environment, **rendezvous.loopback_environment()}
    ranks = range(nodes.rank * nproc, (nodes.rank + 1) * nproc)
    log_dir = log_dir.resolve()
    log_dir.mkdir(parents=True, exist_ok=True)
    for stale in log_dir.glob("rank_*"):
        named = re.fullmatch(r"rank_(\d+)\.(?:log|traceback)", stale.name)
        if named and (nodes.count == 1 or int(named[1]) in ranks):  # other nodes may have begun already
            stale.unlink()
    if stop_file is not None:
        stop_file.unlink(missing_ok=True)
    arguments = pickle.dumps((worker, payload)), log_dir, stop_file
    process_state.start_resource_tracker()  # without `environment`, since it outlives the launch
    try:
        with process_state.kept(environment, elastic_log=log_dir / f"elastic_{nodes.rank}.log"):
            own = {signal.SIGTERM} if stop_file is not None else set()
            signals = [number for number in process_state.handled_signals() if number not in own]
            if stop_file is not None and threading.current_thread() is threading.main_thread():
                signal.signal(signal.SIGTERM, preemption.request_handler(stop_file, _raise_signal))
            config = LaunchConfig(
                min_nodes=nodes.count,
                max_nodes=nodes.count,
                nproc_per_node=nproc,
                max_restarts=0,
                start_method="spawn",  # fork and forkserver would not see LD_PRELOAD
                role="rank",  # lines of rank 0's stderr are shown as "[rank0]:..."
                logs_specs=_FlatLogs(str(log_dir)),
                signals_to_handle=",".join(number.name for number in signals),
                **rendezvous.settings(nodes),
            )
            results = elastic_launch(config, _run_worker)(*arguments)
        return pickle.loads(results[ranks[0]])
    except ChildFailedError as error:
        failure = WorkerError(_describe(error, ranks=ranks, world_size=nodes.count * nproc, log_dir=log_dir))
    except (rendezvous.MeetingError, RendezvousError, distributed.DistError) as error:
        where = "" if nodes.endpoint is None else f" at {nodes.endpoint}"
        failure = WorkerError(f"the launchers of this job did not meet{where}: {str(error).splitlines()[0]}")
    except SignalException as error:  # an Exception: a sweep would count it as a failed job and go on
        failure = KeyboardInterrupt() if error.sigval == signal.SIGINT else SystemExit(128 + error.sigval)
    finally:
        with suppress(OSError):  # of a terminal that was closed
            rich.get_console().show_cursor()  # a rank 0 that was killed inside a progress display left it hidden
    raise failure  # here, where it has no context that keeps elastic's semaphores alive


def _raise_signal(number: int, _: Any) -> NoReturn:
    raise SignalException(f"signal {number}", sigval=signal.Signals(number))


class _FlatLogs(LogsSpecs):
    """One log file per rank, directly in the folder; that of the node's first rank is followed on the terminal."""

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        logs = {local: str(_log_path(Path(self.root_log_dir), int(env["RANK"]))) for local, env in envs.items()}
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


def _run_worker(pickled: bytes, log_dir: Path, stop_file: Path | None) -> bytes:
    """What elastic runs in every worker. Returns the result of the node's first rank, of others None, pickled."""
    # Ctrl-C and the parent's death (torch asks the kernel to tell us) both arrive as SIGINT. The default
    # action ends a worker even inside a collective, where Python's handler would wait for the call to return.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    at_once = [number for number in process_state.SIGNALS if number != signal.SIGTERM or stop_file is None]
    signal.pthread_sigmask(signal.SIG_UNBLOCK, at_once)  # with which the worker was started, so that it could wait
    parent = multiprocessing.parent_process()
    if parent is None or os.getppid() != parent.pid:
        os._exit(1)  # the parent died before torch had asked
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)  # submitit's sign that time is running out is for the parent
    if stop_file is not None:
        preemption.watch(stop_file, parent=os.getppid())
    rank = int(os.environ["RANK"])
    if rank != 0:
        os.dup2(2, 1)
        sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    try:
        with garbage.paused():
            worker, payload = pickle.loads(pickled)  # here and not by elastic: what importing it prints is logged
        result = worker(payload)
        assert isinstance(result, dict), f"the worker returned {type(result).__name__}, not a dict"
        returned = pickle.dumps(result if os.environ["LOCAL_RANK"] == "0" else None)
        if distributed.is_initialized():
            distributed.destroy_process_group()  # on failure it would make the peers fail first
    except BaseException as error:  # SystemExit too, which elastic takes for success when its code is 0
        _record_and_exit(error, _traceback_path(log_dir, rank))
    return returned


def _record_and_exit(error: BaseException, path: Path) -> NoReturn:
    """Write the error down, then end without finalizers, which can hang on a broken process group."""
    summary = f"{type(error).__name__}: {error}".splitlines()[0]
    text = "\n".join([summary, "", *traceback.format_exception(error)])
    with suppress(OSError):  # of a full disk
        try:
            path.write_text(text, encoding="utf-8", errors="backslashreplace")
        except OSError:
            print(summary)  # rank 0's stdout need not be a file
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
    time.sleep(_SECONDS_BETWEEN_RAISE_AND_EXIT)
    os._exit(1)


def _describe(error: ChildFailedError, *, ranks: range, world_size: int, log_dir: Path) -> str:
    """Blame the rank that elastic saw die or, if that one raised, the rank that raised first."""
    rank, failure = error.get_first_failure()
    tracebacks = {r: path for r in ranks if _lines(path := _traceback_path(log_dir, r))}
    if rank in tracebacks:
        rank, path = min(tracebacks.items(), key=lambda item: item[1].stat().st_mtime_ns)
        end = f"failed (exit code 1): {_lines(path)[0]}\n  traceback: {path}"
        return f"rank {rank} of {world_size} {end}\n  log: {_log_path(log_dir, rank)}"
    if failure.exitcode < 0:
        end = f"was killed by signal {-failure.exitcode} ({failure.signal_name()})"
        if failure.exitcode == -signal.SIGKILL:
            end += ", often the system running out of host memory"
    else:
        end = f"ended with exit code {failure.exitcode} and no Python exception"
        if not log_dir.is_dir():
            end += f"; {log_dir} was deleted meanwhile"
        elif shutil.disk_usage(log_dir).free < _FULL_DISK_BYTES:
            end += f"; the disk of {log_dir} is full"
    path = _log_path(log_dir, rank)
    last_line = (_lines(path) or ["(nothing)"])[-1]
    return f"rank {rank} of {world_size} {end}\n  last line of its log: {last_line}\n  log: {path}"


def _lines(path: Path) -> list[str]:
    """The lines of a file that are not blank; none if it was never written."""
    text = path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""
    return [line for line in text.splitlines() if line.strip()]
