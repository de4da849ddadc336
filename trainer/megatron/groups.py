"""Collectives over the parallel groups.

Ranks that hold one model together (tensor and pipeline parallel) work on the same sequences, and so do context-parallel
ranks, each of which holds all weights and computes a part of every sequence; data-parallel ranks on different ones.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Mapping
from typing import TypeVar

import torch
from torch import distributed

Value = TypeVar("Value")


def data_parallel_group() -> distributed.ProcessGroup:
    from megatron.core import parallel_state

    return parallel_state.get_data_parallel_group()  # type: ignore[return-value]


def data_parallel_rank() -> int:
    return data_parallel_group().rank()


def data_parallel_size() -> int:
    return data_parallel_group().size()


def _model_parallel_group() -> distributed.ProcessGroup:
    from megatron.core import parallel_state

    return parallel_state.get_model_parallel_group()  # type: ignore[return-value]


def tensor_parallel_group() -> distributed.ProcessGroup:
    from megatron.core import parallel_state

    return parallel_state.get_tensor_model_parallel_group()  # type: ignore[return-value]


def context_parallel_group() -> distributed.ProcessGroup:
    """Of the ranks that hold the same weights and share sequences."""
    from megatron.core import parallel_state

    return parallel_state.get_context_parallel_group()  # type: ignore[return-value]


def sequence_group() -> distributed.ProcessGroup:
    """Of the ranks that have a part of every sequence between attention layers."""
    from megatron.core import parallel_state

    if context_parallel_group().size() == 1:
        return tensor_parallel_group()
    return parallel_state.get_tensor_and_context_parallel_group()  # type: ignore[return-value]


def expert_group() -> distributed.ProcessGroup:
    """Of the ranks that spread a model's experts."""
    from megatron.core import parallel_state

    return parallel_state.get_expert_model_parallel_group()  # type: ignore[return-value]


def pipeline_group() -> distributed.ProcessGroup:
    from megatron.core import parallel_state

    return parallel_state.get_pipeline_model_parallel_group()  # type: ignore[return-value]


def pipeline_rank() -> int:
    return pipeline_group().rank()


def is_last_stage() -> bool:
    """Whether this rank's pipeline stage is the one that computes outputs and losses."""
    return pipeline_rank() == pipeline_group().size() - 1


def from_stage(stage: int, value: Value) -> Value:
    """What the ranks of pipeline stage ``stage`` pass (pickled). Collective over the pipeline group."""
    return _broadcast(value, pipeline_group(), source=stage)


def from_last_stage(value: Value) -> Value:
    """What the ranks of the last pipeline stage pass (pickled). Collective over the pipeline group."""
    return from_stage(pipeline_group().size() - 1, value)


def tensors_from_last_stage(tensors: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    """The tensors that the ranks of the last pipeline stage pass, on this rank's device."""
    if pipeline_group().size() == 1:
        return tensors
    device = torch.cuda.current_device()
    return tuple(tensor.to(device) for tensor in from_last_stage(tuple(tensor.cpu() for tensor in tensors)))


def agreed(value: Value) -> Value:
    """What the first of the ranks that work on the same sequences passes (pickled). Collective over these."""
    return _broadcast(_broadcast(value, _model_parallel_group(), source=0), context_parallel_group(), source=0)


def asked_once(ask: Callable[[], Value]) -> Value:
    """What ``ask`` gives on the first of the ranks that work on the same sequences (pickled); on others it is not
    called. Collective over these."""
    is_first = _model_parallel_group().rank() == context_parallel_group().rank() == 0
    return agreed(ask() if is_first else None)  # type: ignore[return-value]  # the first rank's


def _broadcast(value: Value, group: distributed.ProcessGroup, *, source: int) -> Value:
    if group.size() == 1:
        return value
    values = [value]
    distributed.broadcast_object_list(values, group=group, group_src=source)
    return values[0]


@functools.cache
def group_among(sets: tuple[tuple[int, ...], ...]) -> distributed.ProcessGroup:
    """Of gloo, of the ranks that ``sets``, which every rank is in one of, put together with this one. Collective over
    the default group."""
    group, _ = distributed.new_subgroups_by_enumeration([list(ranks) for ranks in sets], backend="gloo")
    assert isinstance(group, distributed.ProcessGroup)
    return group


def sum_over_ranks(values: Mapping[str, torch.Tensor | float]) -> dict[str, float]:
    """Sum scalars over the data-parallel ranks in float64. Collective; every rank passes the same keys."""
    return _over_ranks(values, distributed.ReduceOp.SUM)


def largest_over_ranks(values: Mapping[str, torch.Tensor | float]) -> dict[str, float]:
    """The largest of each scalar on any data-parallel rank. Collective; every rank passes the same keys."""
    return _over_ranks(values, distributed.ReduceOp.MAX)


def _over_ranks(
    values: Mapping[str, torch.Tensor | float], operation: distributed.ReduceOp.RedOpType
) -> dict[str, float]:
    names = sorted(values)
    device = torch.cuda.current_device()
    found = torch.stack([torch.as_tensor(values[name], dtype=torch.float64, device=device) for name in names])
    if data_parallel_size() > 1:
        distributed.all_reduce(found, op=operation, group=data_parallel_group())
    return dict(zip(names, found.tolist(), strict=True))


def max_over_ranks(value: int) -> int:
    """Largest ``value`` of the data-parallel ranks. Collective."""
    largest = torch.tensor(value, device=torch.cuda.current_device())
    if data_parallel_size() > 1:
        distributed.all_reduce(largest, op=distributed.ReduceOp.MAX, group=data_parallel_group())
    return int(largest)


def least_of_all_ranks(value: int) -> int:
    """Smallest ``value`` of all ranks. Collective over the default group."""
    values: list[int] = [0] * distributed.get_world_size()
    distributed.all_gather_object(values, value)
    return min(values)


def gathered(value: Value) -> list[Value]:
    """What each data-parallel rank passes (pickled), in their order. Collective."""
    return _gathered(value, data_parallel_group())


def gathered_of_shares(value: Value) -> list[Value]:
    """What each context-parallel rank passes (pickled), in their order. Collective over these."""
    return _gathered(value, context_parallel_group())


def _gathered(value: Value, group: distributed.ProcessGroup) -> list[Value]:
    values = [value] * group.size()
    if group.size() > 1:
        distributed.all_gather_object(values, value, group=group)
    return values


def combined_digest(digest: str) -> str:
    """One SHA-256 over the digests of all ranks. Collective over the default group."""
    digests: list[str] = [""] * distributed.get_world_size()
    distributed.all_gather_object(digests, digest)
    return hashlib.sha256("".join(digests).encode()).hexdigest()
