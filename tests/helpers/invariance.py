"""The policies that must not change a bit, and how their runs are compared."""

import json
from pathlib import Path

from tests.helpers.composing import SMALL, config_of
from tests.helpers.invariance_worker import run_matrix
from trainer.command.launch import launch
from trainer.command.launch_environment import worker_environment

CASES = {
    "none": ("offload=none",),
    "full": ("memory=full",),
    "no_grads": ("memory=no_grads",),
    "lean": ("memory=lean",),
    "rebuild": ("memory=rebuild",),
    "full_arena": ("memory=full", "memory.actor.optim_keeper=arena", "memory.critic.optim_keeper=arena"),
    "lean_saver": ("memory=lean", "memory.actor.optim_keeper=saver", "memory.critic.optim_keeper=saver"),
    "rebuild_saver": ("memory=rebuild", "memory.actor.optim_keeper=saver", "memory.critic.optim_keeper=saver"),
    "many_pieces": ("memory=rebuild", "memory.piece_mib=0.03125"),
    "packed": ("memory=packed", "memory.piece_mib=0.125"),
    "disk": ("memory=disk", f"memory.disk.path={Path(__file__).parent}", "memory.piece_mib=0.125"),
}


def run_cases(cases, *, nproc, log_dir, extra=(), fault=None):
    common = (*SMALL, f"launch.nproc={nproc}", *extra)
    configs = {name: config_of(*common, *overrides) for name, overrides in cases.items()}
    environment = worker_environment(platform="cpu", sleeps=True, threads_per_worker=1)
    return launch(run_matrix, (configs, fault), nproc=nproc, log_dir=log_dir, environment=environment)


def numbers(result):
    """Everything that must be equal, as text: repr of floats is exact."""
    return json.dumps([result["metrics"], result["actor_after_one_more_cycle"]])
