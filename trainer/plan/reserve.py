"""GPU memory that no region holds: activations, CUDA, communicators.

An estimate on the safe side, which a run corrects by what its first step shows. CUDA's context takes 527 MiB, loaded
kernels 200, cuBLAS workspaces 96 and an NCCL communicator at most 560, all measured on an H200.
"""

from __future__ import annotations

from trainer.config.schema import Config
from trainer.plan import activations

GIB, MIB = 2**30, 2**20
MARGIN = 1.1  # activations are known within 10 %
_CUDA_BYTES = 900 * MIB  # with the allocator's rounding
_COMMUNICATOR_BYTES = 560 * MIB


def lasting_bytes(config: Config) -> int:
    """What CUDA and communicators take, of which each way to share work has one, and torch's own group; context
    parallelism two, of those who share sequences and of all who sum their gradients."""
    if config.platform.name == "cpu":
        return 0
    parallel = config.parallel
    dp, cp = config.data_parallel_size, parallel.cp
    ways = (config.world_size, dp, parallel.tp, parallel.pp, parallel.expert, cp, config.weight_copies if cp > 1 else 1)
    return _CUDA_BYTES + _COMMUNICATOR_BYTES * sum(ranks > 1 for ranks in ways)


def reserve_bytes(config: Config, role: str | None, *, trains: bool, vocab_size: int, stage: int) -> int:
    """Of one rank in a phase in which ``role`` (None: nobody) computes: ``offload.reserve_gib``, or an estimate. On the
    CPU, whose room is made up, there is none."""
    if config.offload.reserve_gib is not None:
        return int(config.offload.reserve_gib * GIB)
    if config.platform.name == "cpu":
        return 0
    if role is None:
        return lasting_bytes(config)
    sizes = {"tokens": activations.micro_batch_tokens(config), "vocab_size": vocab_size, "stage": stage}
    of_pass = activations.training_bytes if trains else activations.forward_bytes
    return lasting_bytes(config) + int(MARGIN * of_pass(config, role, **sizes))
