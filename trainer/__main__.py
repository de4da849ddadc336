"""``python -m trainer``: Hydra composes jobs, :mod:`trainer.command.hydra_job` runs them; a sweep ends with a table."""

from __future__ import annotations

from trainer.command import interrupts
from trainer.command.hashes import restart_with_fixed_hashes
from trainer.common import garbage

if __name__ == "__main__":
    restart_with_fixed_hashes()
    interrupts.end_quietly_until_ready()
    garbage.pause()

import signal
from contextlib import suppress
from pathlib import Path

import hydra

from trainer.checkpoint.preemption import STOP_FILE
from trainer.command import exits, jobs, sweeps
from trainer.command.arguments import refuse_bad_overrides
from trainer.command.hydra_job import hydra_job
from trainer.command.sweep_processes import EndWithSweep
from trainer.common.terminal import new_console, tell
from trainer.config import compose as configuration


def _end_of_sweep(sweep: Path, code: int) -> int:
    """Show what became of every job of a sweep that ended with ``code`` -> what the command ends with."""
    with suppress(OSError):
        (sweep / STOP_FILE).unlink()
    found = sweeps.outcomes(sweep)
    if not found:
        if code == 0:
            tell("error: the sweep has no jobs, since one of its overrides lists no values")
        return code if code > 128 else exits.REFUSED
    of_jobs, interrupted = sweeps.exit_code(found), code > 128
    with suppress(OSError):  # of a terminal that was closed
        console = new_console()
        console.print(sweeps.table_of(sweep, found))
        for line in sweeps.failure_lines(found):
            console.print(line, soft_wrap=True, highlight=False)
        if not interrupted:
            _compare(sweep)
    unfinished = sum(job.state != "finished" for job in found)
    if unfinished:
        tell(f"error: {unfinished} of {len(found)} jobs did not finish")
    return code if interrupted else of_jobs or code


def _compare(sweep: Path) -> None:
    """Write the comparison of a sweep's jobs. Whatever goes wrong with it, the sweep's own end is what counts."""
    try:
        from trainer.report.compare_page import write_comparison

        page = write_comparison([sweep], output=sweep).page
        new_console().print(f"comparison: {page}", soft_wrap=True)
    except Exception as error:
        tell(f"the comparison could not be written: {type(error).__name__}: {error}")


def main() -> None:
    """Entry point of ``python -m trainer`` and of the console script ``torpor``."""
    garbage.pass_by_what_exists()
    refuse_bad_overrides()
    configuration.register()
    code = exits.code_of(hydra.main(config_path="pkg://conf", config_name="train", version_base="1.3")(hydra_job))
    if EndWithSweep.asked:
        code = 128 + signal.SIGTERM
    sweep = jobs.SweepDirectory.path
    if sweep is not None:
        try:
            code = _end_of_sweep(sweep, code)
        except KeyboardInterrupt:
            code = 128 + signal.SIGINT
    exits.leave(code)


if __name__ == "__main__":
    main()
