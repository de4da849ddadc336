"""The arguments of a command, judged before Hydra reads them."""

from __future__ import annotations

import sys

from trainer.command import exits
from trainer.common.terminal import tell
from trainer.config.overrides import check_overrides


def refuse_bad_overrides() -> None:
    """End this command with exit code 2 and one line if an override has a value that nothing can take."""
    try:
        check_overrides(sys.argv[1:])
    except ValueError as error:
        tell(f"error: {error}")
        exits.leave(exits.REFUSED)
