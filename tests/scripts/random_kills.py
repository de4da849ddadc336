"""SIGKILL at random moments, then the same command again, until it has finished: the end is that of a run left alone.

    python tests/scripts/random_kills.py run --kills 50        one run with a checkpoint at each step
    python tests/scripts/random_kills.py auto --kills 20       the same with room for one role: offload=auto
    python tests/scripts/random_kills.py disk --kills 20       so too, optimizer states asleep on the disk of $TMPDIR
    python tests/scripts/random_kills.py sweep --kills 20      a sweep of two jobs
    python tests/scripts/random_kills.py parallel --kills 20   the same sweep, both jobs at once (joblib)

The victim is, half of the time, the process that was started, else drawn from that and all it has started, so it is a
launcher, a launcher's process or a worker, in any phase from the first import to the last report. A run that finishes
before all kills are spent is checked and begun anew. Checked each time: metrics and the last checkpoint's bytes equal
those of the run left alone; a command that lost a worker or was killed ends with an error, never in silence; no process
is left over; a job that had finished is not run again. Minutes long, so no part of the test suite. Exit code 0: all
held.
"""

import argparse
import random
import shutil
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

import psutil

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.helpers.checkpoints import files
from tests.helpers.commands import SHORT, lasting_metrics, start

RUN = (*SHORT, "algo.num_steps=6", "checkpoint.every_steps=1")
AUTO = (*RUN, "offload=auto", "launch.gpu_memory_gib=0.0021", "memory.piece_mib=0.125", "hydra.run.dir=job")
SWEEP = ("-m", *SHORT, "algo.num_steps=3", "checkpoint.every_steps=1", "memory=lean,rebuild")
COMMANDS = {
    "run": (*RUN, "hydra.run.dir=job"),
    "auto": AUTO,
    "disk": (*AUTO, "memory=disk", f"memory.disk.path={tempfile.gettempdir()}"),
    "sweep": (*SWEEP, "hydra.sweep.dir=job"),
    "parallel": (*SWEEP, "hydra.sweep.dir=job", "hydra/launcher=parallel"),
}


def ends_of(directory: Path) -> dict[str, tuple]:
    """Job -> its metrics and the files of its last checkpoint."""
    found = {}
    for result in sorted(directory.rglob("result.json")):
        job = result.parent
        latest = job / "checkpoints" / (job / "checkpoints" / "latest").read_text().strip()
        found[str(job.relative_to(directory))] = (lasting_metrics(job), files(latest))
    return found


def family(process: subprocess.Popen) -> list[psutil.Process]:
    try:
        parent = psutil.Process(process.pid)
        return [parent, *parent.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def disturb(process: subprocess.Popen, *, within_seconds: float, draw: random.Random) -> list[psutil.Process]:
    """Kill a random member of the family at a random moment -> the family, whose first the victim was; none if the
    command ended before."""
    try:
        process.wait(timeout=draw.uniform(0, within_seconds))
    except subprocess.TimeoutExpired:
        members = family(process)
        if draw.random() < 0.5:
            draw.shuffle(members)
        with suppress(psutil.NoSuchProcess):
            members[0].kill()
            return members
    return []


def attempt(
    directory: Path, command: tuple[str, ...], *, within_seconds: float, draw: random.Random
) -> tuple[bool, str | None]:
    """Whether the command has finished, and who was killed."""
    before = {path: path.stat().st_mtime_ns for path in directory.rglob("result.json")}
    process = start(directory, *command)
    members = disturb(process, within_seconds=within_seconds, draw=draw) if within_seconds else []
    stdout, stderr = process.communicate(timeout=600)
    survivors = psutil.wait_procs(members, timeout=20)[1]
    assert not survivors, f"left over: {survivors}"
    victim = ("parent" if members[0].pid == process.pid else "child") if members else None
    assert victim is not None or process.returncode == 0, f"failed undisturbed:\n{stdout}\n{stderr}"
    assert victim != "parent" or process.returncode == -9
    assert victim != "child" or process.returncode == 0 or "error: " in stderr, stderr
    assert all(path.stat().st_mtime_ns == time_ns for path, time_ns in before.items()), "a finished job ran again"
    return process.returncode == 0, victim


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=COMMANDS)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--minutes", type=float, default=60, help="no more kills after so many")
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    draw, command = random.Random(given.seed), COMMANDS[given.what]
    root = Path(tempfile.mkdtemp(prefix="random-kills-"))
    started = time.monotonic()
    assert attempt(root / "alone", command, within_seconds=0, draw=draw)[0]
    seconds = time.monotonic() - started
    expected = ends_of(root / "alone")
    print(f"left alone: {seconds:.0f} s, jobs: {', '.join(expected)}", flush=True)
    kills = {"parent": 0, "child": 0}
    finished = attempts = 0

    def more() -> bool:
        return sum(kills.values()) < given.kills and time.monotonic() - started < 60 * given.minutes

    while more():
        done, directory = False, root / f"disturbed_{finished}"
        while not done:
            done, victim = attempt(directory, command, within_seconds=seconds if more() else 0, draw=draw)
            attempts += 1
            if victim is not None:
                kills[victim] += 1
                print(f"kill {sum(kills.values())}: {victim}, {'finished' if done else 'to be repeated'}", flush=True)
        assert ends_of(directory) == expected, f"{directory} has ended differently from {root / 'alone'}"
        finished += 1
    print(
        f"{kills['parent']} parents and {kills['child']} children killed in {attempts} commands; "
        f"all {finished} disturbed ends equal the undisturbed one ({time.monotonic() - started:.0f} s)"
    )
    shutil.rmtree(root)


if __name__ == "__main__":
    main()
