"""``python -m patches.check_versions 0.15.3 0.16.1``: probes and unit tests of the patches on megatron-core versions.

Each version is installed into a temporary folder that shadows the environment's own. Prints rows of a Markdown table;
the exit code is 1 if any version fails. megatron-core from 0.17 on needs Python 3.12.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from importlib import metadata
from pathlib import Path

import patches

_ROOT = Path(__file__).resolve().parent.parent


def _install(version: str, folder: str) -> None:
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", folder]
    subprocess.run([*command, f"megatron-core=={version}"], check=True)


def _run(folder: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": f"{folder}{os.pathsep}{_ROOT}"}
    command = [sys.executable, "-W", "ignore", *arguments]
    return subprocess.run(command, cwd=_ROOT, env=environment, capture_output=True, text=True, check=False)


def _row(version: str) -> tuple[str, bool]:
    """One row (version, state of every patch, last line of pytest) and whether all is well."""
    with tempfile.TemporaryDirectory() as folder:
        _install(version, folder)
        probes = _run(folder, "-m", "patches")
        tests = _run(folder, "-m", "pytest", "-q", *map(str, sorted(_ROOT.glob("tests/unit/test_patches_*.py"))))
    header, *lines = probes.stdout.splitlines() or [probes.stderr]
    assert f"megatron-core {version}," in header, header
    states = [line.split(maxsplit=2)[1] for line in lines]
    good = probes.returncode == tests.returncode == 0
    if not good:
        print(probes.stdout, tests.stdout, sep="\n", file=sys.stderr)
    python = ".".join(map(str, sys.version_info[:3]))
    cells = [version, python, metadata.version("torch"), *states, tests.stdout.splitlines()[-1].split(" in ")[0]]
    return "| " + " | ".join(cells) + " |", good


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("versions", nargs="+", help="megatron-core versions that this Python can install")
    headings = ["megatron-core", "Python", "torch", *patches.NAMES, "unit tests"]
    print("| " + " | ".join(headings) + " |\n|" + "---|" * len(headings))
    all_good = True
    for version in parser.parse_args().versions:
        row, good = _row(version)
        print(row, flush=True)
        all_good &= good
    return 0 if all_good else 1


if __name__ == "__main__":
    sys.exit(main())
