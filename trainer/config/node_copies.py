"""Which ranks of a node hold the same part of the model, and so need one copy of its weights in host memory."""

from __future__ import annotations

import math

from trainer.config.schema import Config


def ranks_of_copies(config: Config) -> tuple[tuple[int, ...], ...]:
    """The ranks that hold the same parameters, experts too, on one node, for every node and part of the model."""
    parallel = config.parallel
    in_stage, parts = config.world_size // parallel.pp, math.lcm(parallel.tp, parallel.expert)
    found: dict[tuple[int, int, int], list[int]] = {}
    for rank in range(config.world_size):
        key = rank // config.launch.nproc, rank // in_stage, rank % in_stage % parts
        found.setdefault(key, []).append(rank)
    return tuple(map(tuple, found.values()))


def ranks_of_a_copy(config: Config) -> int:
    """How many they are; of the smallest, where they are not equally many everywhere."""
    return min(map(len, ranks_of_copies(config)))
