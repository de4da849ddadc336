"""Workers for test_launch.py, importable by name in the spawned processes; as a program, launches one."""

import gc
import json
import os
import resource
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
from torch import distributed

from trainer.command.launch import WorkerError, launch


def _join_process_group() -> None:
    distributed.init_process_group("gloo")


def describe_start(payload: dict) -> dict:
    """What rank 0 found: the sum of all (rank + 1), a terminal or not, what its environment did."""
    _join_process_group()
    total = torch.tensor([float(os.environ["RANK"]) + 1])
    distributed.all_reduce(total)
    print(f"stdout of rank {os.environ['RANK']}")
    print(f"stderr of rank {os.environ['RANK']}", file=sys.stderr)
    return {
        "total": total.item(),
        "rank": int(os.environ["RANK"]),
        "terminal": sys.stdout.isatty(),
        "hash_randomization": sys.flags.hash_randomization,
        "marker": os.environ["TORPOR_TEST"],
        "searches_garbage": gc.isenabled(),
        "passed_by": gc.get_freeze_count() > 10_000,
        "payload": payload,
    }


def fail(payload: dict) -> dict:
    """Rank ``payload["rank"]`` ends as ``payload["how"]`` says; the others wait for it in a collective."""
    _join_process_group()
    distributed.barrier()
    if int(os.environ["RANK"]) == payload["rank"]:
        match payload["how"]:
            case "raise":
                raise LookupError("no such bear\nsecond line")
            case "full disk":
                resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
                raise LookupError("that nobody can write down")
            case "os._exit":
                os._exit(7)
            case "SIGKILL":
                os.kill(os.getpid(), signal.SIGKILL)
            case "SystemExit":
                sys.exit(0)
    distributed.barrier()
    return {}


def wait_for_ever(payload: dict) -> dict:
    """Leave a file named by the process id, then never end: rank 0 in Python, the others in a C++ call."""
    (Path(payload["pids"]) / str(os.getpid())).touch()
    while os.environ["RANK"] == "0":
        time.sleep(0.1)
    distributed.HashStore().wait(["never"], timedelta(hours=1))
    return {}


if __name__ == "__main__":
    # launch_targets.py <name of a worker> <payload as JSON> <log_dir>
    import launch_targets

    target = getattr(launch_targets, sys.argv[1])
    environment = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "TORPOR_TEST": "here"}
    try:
        result = launch(target, json.loads(sys.argv[2]), nproc=2, log_dir=Path(sys.argv[3]), environment=environment)
        print("RESULT " + json.dumps(result))
    except WorkerError as error:
        sys.exit(str(error))
