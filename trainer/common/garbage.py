"""When Python searches for garbage. Imports make none, and searches would take a fifth of the time of ours."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


def pause() -> None:
    """No search until :func:`pass_by_what_exists`, for imports."""
    gc.disable()


def pass_by_what_exists() -> None:
    """Search among later objects alone: one among all of torch and megatron takes 100 ms and more, in whatever phase it
    happens. What is garbage by now stays, unless somebody has called ``gc.collect()``."""
    gc.freeze()
    gc.enable()


def collect_for_good() -> None:
    """Free what is garbage by now, and pass by all else that exists."""
    gc.collect()
    pass_by_what_exists()


@contextmanager
def paused() -> Iterator[None]:
    """No search inside, and later none among what exists by then."""
    pause()
    try:
        yield
    finally:
        pass_by_what_exists()
