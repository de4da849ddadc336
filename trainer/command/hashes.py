"""One seed of Python's hashes in the parent and all workers, since the order of a set of texts follows from it.

A data set that goes through a set (several of reasoning-gym's do) then asks the same questions in every process, in a
run that is repeated and in one that is resumed.
"""

import os
import sys

HASH_SEED = "0"
VARIABLE = "PYTHONHASHSEED"


def restart_with_fixed_hashes() -> None:
    """Start this process's program anew, with the same arguments, unless it runs with the seed already: an interpreter
    takes it when it starts. Call it before anything else, and in programs of ours alone."""
    if os.environ.get(VARIABLE) != HASH_SEED:
        os.execve(sys.executable, sys.orig_argv, os.environ | {VARIABLE: HASH_SEED})
