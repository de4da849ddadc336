"""Start the command line as a user does, and look at what it left."""

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from tests.helpers.composing import SMALL
from tests.helpers.recording import lasting

ROOT = Path(__file__).parents[2]


SHORT = (
    "debug=one_step",
    *(override for override in SMALL if override.startswith(("platform", "launch", "model", "rollout"))),
)


@dataclass(frozen=True)
class Done:
    """A finished command: its exit code, what it wrote, and where it ran."""

    code: int
    stdout: str
    stderr: str
    directory: Path

    def jobs(self) -> dict[str, Path]:
        """Directories in which a job was started, by their last name."""
        return {path.parent.name: path.parent for path in sorted(self.directory.rglob(".hydra"))}


def start(directory: Path, *arguments: str, **variables: str) -> subprocess.Popen:
    directory.mkdir(exist_ok=True)
    # A CUDA-capable machine runs these on the CPU too; the width keeps tables from folding their cells.
    environment = os.environ | {"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": "", "COLUMNS": "160"} | variables
    command = [sys.executable, "-m", "trainer", *arguments]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, cwd=directory, env=environment, stdout=pipe, stderr=pipe, text=True)


def torpor(directory: Path, *arguments: str) -> Done:
    process = start(directory, *arguments)
    stdout, stderr = process.communicate(timeout=300)
    return Done(process.returncode, stdout, stderr, directory)


def lasting_metrics(job: Path) -> list[dict]:
    """The records without what depends on the machine's load and memory."""
    return lasting(map(json.loads, (job / "metrics.jsonl").read_text().splitlines()))
