"""Tools: functions that an environment calls on a model's behalf, each in a process of its own under a time limit.

The process is kept from call to call. One that takes too long is killed, with all that it has started, and replaced;
so is one that dies. It ends with its tool, and when the process that made it ends, however that happens.

Simplified: one call at a time. A process of its own is no sandbox: the function may do what its user may.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection

from trainer.common.imports import import_named

_START_SECONDS = 120.0  # for the imports of the function's module
_PROGRAM = "from trainer.tasks.tool_process import main; main()"


@dataclass(frozen=True)
class ToolResult:
    """``text``: what the tool returned, or in words why it did not. ``outcome``: ``ok``, ``failed`` (it raised
    something or its process died) or ``timed_out``."""

    text: str
    outcome: str = "ok"

    @property
    def is_ok(self) -> bool:
        return self.outcome == "ok"


class Tool:
    """A function (text) -> anything that has a text, to be called through its process.

    Args:
        name: for messages, the model's among them.
        function: at the top of a module that can be imported.
        seconds: after which a call is given up.

    Raises:
        ValueError: ``seconds`` is not positive, or the function cannot be imported (a lambda, for instance).
    """

    def __init__(self, name: str, function: Callable[[str], object], *, seconds: float) -> None:
        if not 0 < seconds < float("inf"):
            raise ValueError(f"tool {name}: seconds={seconds} must be a finite number greater than 0")
        self._name, self._seconds = name, seconds
        self._path = f"{function.__module__}.{function.__qualname__}"
        if "<" in self._path or import_named(self._path, setting=f"tool {name}") is not function:
            raise ValueError(
                f"tool {name}: {self._path} cannot be imported in another process: put the function at the top of a "
                "module"
            )
        self._process: _Process | None = None

    def __call__(self, text: str) -> ToolResult:
        """What the function makes of ``text``. Whatever happens in it becomes a result.

        Raises:
            RuntimeError: its process cannot be started.
        """
        if self._process is None:
            self._process = _Process(self._name, self._path, seconds=self._seconds)
        try:
            answer = self._process.ask(text)
        except (EOFError, OSError):
            self.close()
            return ToolResult(f"{self._name} ended unexpectedly", "failed")
        if answer is None:
            self.close()
            return ToolResult(f"{self._name} took more than {self._seconds:g} s", "timed_out")
        return ToolResult(answer[1:].decode(), "ok" if answer[:1] == b"1" else "failed")

    def close(self) -> None:
        """End the process; the next call starts another one."""
        if self._process is not None:
            self._process.end()
            self._process = None


class _Process:
    """A running :mod:`trainer.tasks.tool_process`."""

    def __init__(self, name: str, path: str, *, seconds: float) -> None:
        self._seconds = seconds
        self._channel, theirs = Pipe()
        environment = {key: value for key, value in os.environ.items() if key != "LD_PRELOAD"}  # a GPU worker's
        environment["PYTHONPATH"] = os.pathsep.join(folder or os.getcwd() for folder in sys.path)
        with theirs:
            process = subprocess.Popen(
                [sys.executable, "-c", _PROGRAM, str(theirs.fileno()), path, str(seconds)],
                stdin=subprocess.DEVNULL,
                env=environment,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        self.end = weakref.finalize(self, _end, process, self._channel)
        try:
            is_ready = self._channel.poll(_START_SECONDS) and self._channel.recv_bytes() == b"ready"
        except (EOFError, OSError):
            is_ready = False
        if not is_ready:
            self.end()
            raise RuntimeError(
                f"the process of tool {name} ({path}) did not start: what it wrote to standard error says why"
            )

    def ask(self, text: str) -> bytes | None:
        """The function's answer, 1 or 0 (it raised) and a text; None if it took too long."""
        self._channel.send_bytes(text.encode(errors="replace"))
        return self._channel.recv_bytes() if self._channel.poll(self._seconds) else None


def _end(process: subprocess.Popen[bytes], channel: Connection) -> None:
    """Kill the process and what it has started. Until it is waited for, nobody else can have its number."""
    channel.close()
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
