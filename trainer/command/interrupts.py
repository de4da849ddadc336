"""Ctrl-C while a program of ours still imports what it needs: one line and exit code 130, no traceback.

Imports nothing heavy, since it has to come before what does.
"""

import os
import signal
from contextlib import suppress
from types import FrameType

_ENDED_BY_CTRL_C = 128 + signal.SIGINT


def end_quietly_until_ready() -> None:
    """From now on Ctrl-C ends this process at once, until :func:`ready`. Nothing is lost: nothing has begun."""
    if signal.getsignal(signal.SIGINT) == signal.default_int_handler:
        signal.signal(signal.SIGINT, _end)


def ready() -> None:
    """Ctrl-C is a KeyboardInterrupt again."""
    if signal.getsignal(signal.SIGINT) == _end:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _end(number: int, frame: FrameType | None) -> None:
    with suppress(OSError):
        os.write(2, b"interrupted by Ctrl-C\n")
    os._exit(_ENDED_BY_CTRL_C)
