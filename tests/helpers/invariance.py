"""The policies that must not change a bit, and how their runs are compared."""

import json
from pathlib import Path

from tests.helpers.composing import SMALL, config_of, footprint_of
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


KEEPERS = ("lean", "rebuild", "packed", "disk")
VOCABULARY = 320


def scheduled_cases(*, nproc):
    """Name -> overrides of ``offload=auto`` for each of ``KEEPERS``: with room for everything, for one role that trains
    and the engine, and for the largest phase alone."""
    return {
        f"{keeper}, room for {name}": (
            *CASES[keeper],
            *("offload=auto", "offload.reserve_gib=0", "memory.piece_mib=0.03125"),
            f"launch.gpu_memory_gib={size_bytes / 2**30!r}",
        )
        for keeper in KEEPERS
        for name, size_bytes in _rooms(CASES[keeper], nproc=nproc).items()
    }


def _rooms(overrides, *, nproc):
    config = config_of(*SMALL, *overrides, f"launch.nproc={nproc}")
    holdings = footprint_of(config, vocab_size=VOCABULARY).holdings
    size = {role: sum(h.train_bytes for h in holdings if h.role == role) for role in ("actor", "critic", "engine")}
    tags = sum(h.host_awake_bytes for h in holdings if h.kind == "weights/ref") * 2
    return {
        "everything": sum(size.values()) + tags,
        "a role and the engine": max(size["actor"], size["critic"]) + size["engine"],
        "the largest phase": max(size["actor"], size["critic"]),
    }


def run_cases(cases, *, nproc, log_dir, extra=(), fault=None):
    common = (*SMALL, f"launch.nproc={nproc}", *extra)
    configs = {name: config_of(*common, *overrides) for name, overrides in cases.items()}
    environment = worker_environment(platform="cpu", sleeps=True, threads_per_worker=1)
    return launch(run_matrix, (configs, fault), nproc=nproc, log_dir=log_dir, environment=environment)


def numbers(result):
    """Everything that must be equal, as text: repr of floats is exact."""
    return json.dumps([result["metrics"], result["actor_after_one_more_cycle"]])
