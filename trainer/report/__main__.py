"""``python -m trainer.report DIR...``: compare runs and sweeps."""

import argparse
import sys
from pathlib import Path

from trainer.common.terminal import new_console
from trainer.report.compare_page import write_comparison


def main() -> int:
    """Print the comparison and write it; 2 if there is nothing to compare, 1 if it could not be written."""
    parser = argparse.ArgumentParser(prog="python -m trainer.report", description="Compare runs and sweeps.")
    parser.add_argument(
        "directories", nargs="+", type=Path, metavar="DIR", help="a run, a sweep, or any folder of such"
    )
    parser.add_argument("--output", type=Path, help="where to write (default: DIR; ./comparison for several)")
    arguments = parser.parse_args()
    directories = arguments.directories
    output = arguments.output or (directories[0] if len(directories) == 1 else Path("comparison"))
    try:
        comparison = write_comparison(directories, output=output)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2 if isinstance(error, ValueError) else 1
    console = new_console()
    console.print(*comparison.facts, sep="\n", highlight=False, soft_wrap=True)
    for table in comparison.tables:
        console.print(table)
    console.print(f"comparison: {comparison.page}", soft_wrap=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
