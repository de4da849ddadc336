"""How a command ends: exit codes, and one line instead of a traceback where a signal ended it.

0    finished
1    a run failed
2    refused: what was asked for cannot be run as it stands
128+n  ended by signal n: 130 Ctrl-C, 143 SIGTERM, 129 the terminal was closed
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any, NoReturn

from hydra.errors import CompactHydraException

from trainer.command import interrupts
from trainer.common.terminal import tell
from trainer.config.hints import hint_for, hint_for_flags

FAILED, REFUSED = 1, 2
_ENDED_BY_CTRL_C = 128 + signal.SIGINT
_LIBRARIES_OF_CONFIGS = ("hydra", "omegaconf")


class JobError(CompactHydraException):
    """A job of a sweep did not finish; one string, so that every launcher can pickle it, and shown without frames."""


class Said(SystemExit):
    """The end of a command that has said why."""


def code_of(command: Callable[[], Any]) -> int:
    """Run a command of Hydra's -> its exit code; what went wrong has been said."""
    with _ending_by_signals():
        try:
            interrupts.ready()
            command()
        except SystemExit as error:
            if isinstance(error.code, str):
                tell(error.code)
            code = error.code if isinstance(error.code, int) else FAILED if error.code else 0
            return _judged(error, code)
        except KeyboardInterrupt:
            tell("interrupted by Ctrl-C")
            return _ENDED_BY_CTRL_C
    return 0


def leave(code: int) -> NoReturn:
    """End this process, with that code also if there is no terminal any more."""
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except OSError:
        os._exit(code)
    sys.exit(code)


def _judged(error: SystemExit, code: int) -> int:
    """Hydra ends with 1 whatever it did not like: a config that it refuses is no failed run."""
    cause = error.__context__
    library = "" if cause is None else type(cause).__module__.partition(".")[0]
    if code not in (FAILED, REFUSED) or isinstance(error, Said) or isinstance(cause, JobError):
        return code
    if library != "omegaconf":  # whose own message says it already
        hint = hint_for_flags(sys.argv[1:]) or hint_for(error)
        if hint:
            tell(f"hint: {hint}")
    return REFUSED if library in _LIBRARIES_OF_CONFIGS else code


@contextmanager
def _ending_by_signals() -> Iterator[None]:
    """SIGTERM, and SIGHUP unless it is ignored (nohup), end this process in one line. A launch has its own ways."""

    def end(number: int, _: FrameType | None) -> NoReturn:
        tell(f"{signal.Signals(number).name}: ended")
        raise SystemExit(128 + number)

    handled = [n for n in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(n) == signal.SIG_DFL]
    for number in handled:
        signal.signal(number, end)
    try:
        yield
    finally:
        for number in handled:
            with suppress(ValueError):
                signal.signal(number, signal.SIG_DFL)
