"""Every setting with bad and extreme values, and mixtures of extremes: a command is planned, or refused clearly.

    python -m tests.scripts.fuzz_config [--mixed 300] [--seed 0] [--only REGEX] [--start 0] [--stop N]

Cases run in a process of their own, so one that aborts it, or takes more than five seconds, is counted as well. Exit
code 0: all were accepted or refused with a message that names a setting of the case.
"""

from __future__ import annotations

import argparse
import multiprocessing
import re
import sys
import time
from collections import Counter
from multiprocessing.connection import Connection

import psutil

from tests.helpers.config_cases import Case, all_cases, mixed_cases, outcome

LIMIT_SECONDS = 5  # of processor time: other work on the machine is no hang
_FORK = multiprocessing.get_context("fork")


def _work(pipe: Connection) -> None:
    while True:
        pipe.send(outcome(*pipe.recv()))


class Worker:
    """A process that runs cases; after a hang or an abort it is no more."""

    def __init__(self) -> None:
        self._pipe, theirs = _FORK.Pipe()
        self.process = _FORK.Process(target=_work, args=(theirs,), daemon=True)
        self.process.start()
        theirs.close()

    def run(self, base: Case, case: Case) -> str:
        used, start = self._seconds(), time.monotonic()
        self._pipe.send((base, case))
        while not self._pipe.poll(1):
            waited = time.monotonic() - start
            if self.process.is_alive() and (self._seconds() - used > LIMIT_SECONDS or waited > 20 * LIMIT_SECONDS):
                self.process.kill()
                self.process.join()
                return f"hang: more than {LIMIT_SECONDS} s"
        try:
            return self._pipe.recv()
        except EOFError:
            self.process.join()
            return f"abort: exit code {self.process.exitcode}"

    def _seconds(self) -> float:
        times = psutil.Process(self.process.pid).cpu_times()
        return times.user + times.system


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mixed", type=int, default=300, help="how many mixtures of extremes")
    parser.add_argument("--seed", type=int, default=0, help="of the mixtures")
    parser.add_argument("--only", default="", help="settings that this expression finds, and no mixtures")
    parser.add_argument("--start", type=int, default=0, help="number of the first case, to go on with")
    parser.add_argument("--stop", type=int, help="number of the first case that is left out; all follow without it")
    arguments = parser.parse_args()
    cases = [(base, case) for base, case in all_cases() if re.search(arguments.only, case[0].partition("=")[0])]
    cases += [] if arguments.only else mixed_cases(arguments.mixed, seed=arguments.seed)
    worker, counts, start = Worker(), Counter(), time.monotonic()
    for number, (base, case) in enumerate(cases[arguments.start : arguments.stop], start=arguments.start):
        found = worker.run(base, case)
        kind = found.partition(":")[0]
        counts[kind] += 1
        if kind not in ("accepted", "refused"):
            print(f"{found}\n    {' '.join(base)}  {' '.join(override[:100] for override in case)}", flush=True)
        if not worker.process.is_alive():
            worker = Worker()
        if number % 500 == 499:
            print(f"{number + 1} of {len(cases)} cases, {time.monotonic() - start:.0f} s", file=sys.stderr, flush=True)
    print(f"{counts.total()} cases in {time.monotonic() - start:.0f} s: {dict(counts)}")
    sys.exit(0 if set(counts) <= {"accepted", "refused"} else 1)


if __name__ == "__main__":
    main()
