"""Whether a folder's job is the one that a command asks for, what tells them apart, and what the machine decides alone.

The sums of a run differ by the number of threads, which follows the machine's cores unless a command says it. A run
that goes on keeps the number that it was begun with.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from trainer.checkpoint import folder as checkpoints
from trainer.common.units import format_setting
from trainer.config.identity import decisive, to_plain
from trainer.config.schema import Config

_MOST_NAMED = 5


def as_begun(config: Config, known: Mapping[str, Any], *, left_open: Collection[str]) -> Config:
    """``config`` with the threads of the run that ``known`` records, where the command leaves them to the machine
    (``launch.threads_per_worker`` is ``left_open``). Of several nodes each has its own number, which no record
    holds."""
    threads = known["launch"].get("threads_per_worker")
    if "launch.threads_per_worker" not in left_open or config.launch.nnodes > 1 or not isinstance(threads, int):
        return config
    launch = dataclasses.replace(config.launch, threads_per_worker=threads)
    return dataclasses.replace(config, launch=launch)


def what_differs(known: Mapping[str, Any], config: Config, directory: Path) -> dict[str, tuple[Any, Any]]:
    """Setting -> (that of the job which ``known`` records, that of ``config``), of those that decide what a job is.

    Going on in the job's own directory makes it no other job; going on from another run does.
    """
    there, here = decisive(dict(known)), decisive(to_plain(config))
    if checkpoints.is_inside(here["resume"], directory):
        there, here = there | {"resume": None}, here | {"resume": None}
    elif there["resume"] is not None and Path(there["resume"]).resolve() == Path(here["resume"]).resolve():
        here = here | {"resume": there["resume"]}  # spelled otherwise
    return checkpoints.differences(there, here)


def describe(different: Mapping[str, tuple[Any, Any]]) -> str:
    """``seed=2 where that has seed=1, ...``: the first few."""
    named = [
        f"{key}={format_setting(here)} where that has {format_setting(there)}"
        for key, (there, here) in list(different.items())[:_MOST_NAMED]
    ]
    more = len(different) - _MOST_NAMED
    return ", ".join(named) + (f", and {more} more" if more > 0 else "")
