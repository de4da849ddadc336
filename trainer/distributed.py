"""Collectives over the data-parallel group, and the seeds of every random draw."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import torch
from torch import distributed


def data_parallel_group() -> distributed.ProcessGroup:
    from megatron.core import parallel_state

    return parallel_state.get_data_parallel_group()  # type: ignore[return-value]


def data_parallel_rank() -> int:
    return data_parallel_group().rank()


def data_parallel_size() -> int:
    return data_parallel_group().size()


def sum_over_ranks(values: Mapping[str, torch.Tensor | float]) -> dict[str, float]:
    """Sum scalars over the data-parallel ranks in float64. Collective; every rank passes the same keys."""
    names = sorted(values)
    device = torch.cuda.current_device()
    sums = torch.stack([torch.as_tensor(values[name], dtype=torch.float64, device=device) for name in names])
    if data_parallel_size() > 1:
        distributed.all_reduce(sums, group=data_parallel_group())
    return dict(zip(names, sums.tolist(), strict=True))


def max_over_ranks(value: int) -> int:
    """Largest ``value`` of the data-parallel ranks. Collective."""
    largest = torch.tensor(value, device=torch.cuda.current_device())
    if data_parallel_size() > 1:
        distributed.all_reduce(largest, op=distributed.ReduceOp.MAX, group=data_parallel_group())
    return int(largest)


def combined_digest(digest: str) -> str:
    """One SHA-256 over the digests of all ranks. Collective over the default group."""
    digests: list[str] = [""] * distributed.get_world_size()
    distributed.all_gather_object(digests, digest)
    return hashlib.sha256("".join(digests).encode()).hexdigest()


def seed_for(seed: int, purpose: str, *, step: int = 0, rank: int = 0) -> int:
    """The seed of one random draw, in [0, 2^31). Keyed by what is drawn and not by what was drawn before, so that a
    resumed run draws what the unbroken one would have."""
    digest = hashlib.sha256(f"{seed}/{purpose}/{step}/{rank}".encode()).digest()
    return int.from_bytes(digest[:4], "big") >> 1
