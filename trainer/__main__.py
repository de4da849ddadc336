"""``python -m trainer``: Hydra composes jobs, :mod:`trainer.command.hydra_job` runs them; a sweep ends with a table."""

from __future__ import annotations

from trainer.command.hashes import restart_with_fixed_hashes

if __name__ == "__main__":
    restart_with_fixed_hashes()

import sys
from pathlib import Path

import hydra
from omegaconf.errors import OmegaConfBaseException

from trainer.command import jobs
from trainer.command.arguments import refuse_bad_overrides
from trainer.command.hydra_job import JobError, hydra_job
from trainer.common.terminal import new_console
from trainer.config import compose as configuration
from trainer.config.hints import hint_for, hint_for_flags


def _show_sweep(sweep: Path) -> str | None:
    """Show what became of every job of a sweep -> what the user must be told went wrong, if anything."""
    table = jobs.sweep_table(sweep)
    if not table.rows:
        return "the sweep has no jobs, since one of its overrides lists no values"
    new_console().print(table)
    failures = jobs.failure_lines(sweep)
    for line in failures:
        new_console().print(line, soft_wrap=True, highlight=False)
    _compare(sweep)
    return f"{len(failures) // 2} of {len(table.rows)} jobs did not finish" if failures else None


def _compare(sweep: Path) -> None:
    """Write the comparison of a sweep's jobs. Whatever goes wrong with it, the sweep's own end is what counts."""
    try:
        from trainer.report.compare_page import write_comparison

        page = write_comparison([sweep], output=sweep).page
        new_console().print(f"comparison: {page}", soft_wrap=True)
    except Exception as error:
        print(f"the comparison could not be written: {type(error).__name__}: {error}", file=sys.stderr)


def main() -> None:
    """Entry point of ``python -m trainer`` and of the console script ``torpor``."""
    refuse_bad_overrides()
    configuration.register()
    try:
        hydra.main(config_path="pkg://conf", config_name="train", version_base="1.3")(hydra_job)()
    except SystemExit as error:
        if error.code not in (0, None) and not isinstance(error.__context__, OmegaConfBaseException | JobError):
            hint = hint_for_flags(sys.argv[1:]) or hint_for(error)
            if hint:
                print(f"hint: {hint}", file=sys.stderr)
        raise
    finally:
        sweep = jobs.SweepDirectory.path
        problem = None if sweep is None else _show_sweep(sweep)
        if problem is not None:
            print(f"error: {problem}", file=sys.stderr)
    if problem is not None:  # although the sweeper was content
        sys.exit(1)


if __name__ == "__main__":
    main()
