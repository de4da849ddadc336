"""Collectives in a group of one rank without a communicator.

Target: the collectives of torch.distributed that megatron-core calls, and the names under which
    megatron.core.distributed.param_and_grad_buffer imported them.
Why: megatron-core runs its collectives in groups of one rank too (data-parallel size 1, tensor-parallel size 1, ...).
    Each such group makes an NCCL communicator, about 390 MiB of GPU memory that no sleep gives back.
How: a wrapper answers for groups of one rank: in-place collectives change nothing, gathers and scatters copy input to
    output. Every other group goes to the original.
Upstream: torch.distributed creates communicators lazily, but does not leave them out.
Remove when: megatron-core or torch skips collectives of one rank.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, distributed
from torch.distributed import distributed_c10d

from patches.registry import Patch, Replacement

# name -> (position of the group argument, what one rank does with the call's bound arguments)
_IN_PLACE = {"all_reduce": 2, "broadcast": 2, "barrier": 0}
_INTO_TENSOR = ("all_gather_into_tensor", "reduce_scatter_tensor")


class _Done:
    """A finished Work handle."""

    def wait(self, *_: Any, **__: Any) -> bool:
        return True

    def is_completed(self) -> bool:
        return True


def _is_alone(group: Any) -> bool:
    if not distributed.is_initialized():
        return False
    group = distributed.group.WORLD if group is None else group
    return isinstance(group, distributed.ProcessGroup) and group.size() == 1


def _in_place(original: Callable[..., Any], group_position: int) -> Callable[..., Any]:
    @functools.wraps(original)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        group = args[group_position] if len(args) > group_position else kwargs.get("group")
        if not _is_alone(group):
            return original(*args, **kwargs)
        return _Done() if kwargs.get("async_op") else None

    return wrapper


def _into_tensor(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def wrapper(output: Tensor, input: Tensor, *args: Any, **kwargs: Any) -> Any:
        groups = [argument for argument in args if isinstance(argument, distributed.ProcessGroup)]
        if not _is_alone(groups[0] if groups else kwargs.get("group")):
            return original(output, input, *args, **kwargs)
        if output.data_ptr() != input.data_ptr():
            output.copy_(input.view(output.shape))
        return _Done() if kwargs.get("async_op") else None

    return wrapper


def _all_gather(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def wrapper(tensor_list: list[Tensor], tensor: Tensor, group: Any = None, async_op: bool = False) -> Any:
        if not _is_alone(group):
            return original(tensor_list, tensor, group=group, async_op=async_op)
        tensor_list[0].copy_(tensor)
        return _Done() if async_op else None

    return wrapper


def _coalescing_manager(original: Callable[..., Any]) -> Callable[..., Any]:
    @contextmanager
    def manager(group: Any = None, device: Any = None, async_ops: bool = False) -> Iterator[Any]:
        if _is_alone(group):
            yield _Done()
        else:
            with original(group, device, async_ops) as inner:
                yield inner

    return manager


def _replacements() -> list[Replacement]:
    wrappers = {name: _in_place(getattr(distributed, name), position) for name, position in _IN_PLACE.items()}
    wrappers |= {name: _into_tensor(getattr(distributed, name)) for name in _INTO_TENSOR}
    wrappers["all_gather"] = _all_gather(distributed.all_gather)
    # Object collectives of torch look the plain ones up in their own module.
    replacements = [(owner, name, new) for owner in (distributed, distributed_c10d) for name, new in wrappers.items()]

    from megatron.core.distributed import param_and_grad_buffer as upstream

    return [
        *replacements,
        (upstream, "dist_all_gather_func", wrappers["all_gather_into_tensor"]),
        (upstream, "dist_reduce_scatter_func", wrappers["reduce_scatter_tensor"]),
        (upstream, "_coalescing_manager", _coalescing_manager(upstream._coalescing_manager)),
    ]


def _probe() -> tuple[str, str]:
    from megatron.core.distributed import param_and_grad_buffer as upstream

    names = ("dist_all_gather_func", "dist_reduce_scatter_func", "_coalescing_manager")
    missing = [name for name in names if not hasattr(upstream, name)]
    if missing:
        return "CHANGED", f"{upstream.__name__} no longer has {', '.join(missing)}"
    return "OK", "applies"


PATCH = Patch(
    name="one_rank_groups",
    target="collectives of torch.distributed in groups of one rank",
    why="no NCCL communicator, and its GPU memory, for groups of one rank",
    replacements=_replacements,
    probe=_probe,
    after=("cpu_platform",),  # importing megatron looks for a GPU
)
