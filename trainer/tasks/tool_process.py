"""The process of a tool (:mod:`trainer.tasks.tools`): calls its function with each text that comes through a pipe.

It ends when the pipe does. Should a function never return while nobody is left to kill it, an alarm of its own ends it.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Callable
from multiprocessing.connection import Connection

from trainer.common.imports import import_named

_GRACE_SECONDS = 1.0  # after the time limit, when whoever calls would have killed this process
_LONGEST = 10_000  # characters of an answer; what is longer is cut


def main() -> None:
    """``sys.argv`` holds the pipe's descriptor, the function's dotted path and its time limit."""
    descriptor, path, seconds = sys.argv[1:]
    channel = Connection(int(descriptor))
    os.dup2(2, 1)  # what a function prints is no answer
    function = import_named(path, setting="tool")
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    with contextlib.suppress(EOFError, OSError):  # nobody is at the other end any more
        channel.send_bytes(b"ready")
        while True:
            text = channel.recv_bytes().decode()
            signal.setitimer(signal.ITIMER_REAL, float(seconds) + _GRACE_SECONDS)
            answer = _answer(function, text)
            signal.setitimer(signal.ITIMER_REAL, 0.0)
            channel.send_bytes(answer)


def _answer(function: Callable[[str], object], text: str) -> bytes:
    """1 and what it returned, or 0 and what it raised, SystemExit too."""
    try:
        kind, answer = "1", str(function(text))
    except BaseException as error:
        kind, answer = "0", f"{type(error).__name__}: {error}"
    return (kind + answer[:_LONGEST]).encode(errors="replace")
