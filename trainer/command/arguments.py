"""The arguments of a command, judged before Hydra reads them."""

from __future__ import annotations

import sys

from trainer.config.overrides import check_overrides


def refuse_bad_overrides() -> None:
    """End this command with exit code 2 and one line if an override has a value that nothing can take."""
    try:
        check_overrides(sys.argv[1:])
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
