"""The console script ``torpor``: what ``python -m trainer`` is."""

import os
import sys

from trainer.command import interrupts
from trainer.command.hashes import restart_with_fixed_hashes
from trainer.common import garbage


def main() -> None:
    restart_with_fixed_hashes()
    interrupts.end_quietly_until_ready()
    garbage.pause()
    if not sys.flags.safe_path:
        sys.path.insert(0, os.getcwd())  # as ``python -m`` does: modules of the user's in the current folder are found
    from trainer.__main__ import main as run  # seconds, which only the process that stays should spend

    run()


if __name__ == "__main__":
    main()
