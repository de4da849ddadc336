"""The ranks of test_process_groups: every collective that Megatron and Torpor use, over groups that come and go."""

import os
import threading
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any

import torch
from torch import distributed
from torch.distributed import distributed_c10d

import patches
from patches import reloadable_groups
from tests.helpers.invariance_worker import run_matrix
from trainer.config.schema import Config

CYCLES = 4


def run_jobs(configs: Mapping[str, Config]) -> dict[str, Any]:
    """The results of each job, and how often this rank's groups were made."""
    results = run_matrix((configs, None))
    return {"results": results, "generations": [group.generation for group in reloadable_groups.groups()]}


def run_cycles(_: Any) -> dict[str, Any]:
    """What the collectives gave in every cycle, what was open then, and how use of a destroyed group ends."""
    patches.apply("cpu_platform", "reloadable_groups")
    distributed.init_process_group(reloadable_groups.register("gloo"), timeout=timedelta(seconds=60))
    world_size = distributed.get_world_size()
    group = distributed.new_group(range(world_size))
    plain = distributed.new_group(range(world_size), backend="gloo")
    single = [distributed.new_group([rank]) for rank in range(world_size)][distributed.get_rank()]
    assert group is not None
    result: dict[str, Any] = {"values": [], "open": [], "errors": {}, "backend": distributed.get_backend(group)}
    for _cycle in range(CYCLES):
        result["values"].append(collectives(group) | {"single": summed(single), "world": summed(None)})
        with reloadable_groups.destroyed():
            result["while_destroyed"] = {
                "live": sum(not handle.is_destroyed for handle in reloadable_groups.groups()),
                "ranks": distributed.get_process_group_ranks(group),
                "shape": [group.rank(), group.size(), distributed.get_rank(group), distributed.get_world_size(group)],
                "plain": summed(plain),
            }
            result["errors"] = {name: error_of(use, group) for name, use in USES.items()}
        result["live"] = sum(not handle.is_destroyed for handle in reloadable_groups.groups())
        result["open"].append((len(os.listdir("/proc/self/fd")), threads()))
    distributed.destroy_process_group(group)
    result["left"] = len(reloadable_groups.groups())
    distributed.destroy_process_group()
    result["left_at_end"] = len(reloadable_groups.groups())
    return result


def threads() -> int:
    assert threading.active_count() == 1
    return len(os.listdir("/proc/self/task"))


def summed(group: Any) -> float:
    """The sum over ranks of rank + 1."""
    value = torch.tensor([distributed.get_rank() + 1.0])
    distributed.all_reduce(value, group=group)
    return value.item()


def collectives(group: Any) -> dict[str, Any]:
    """Each collective's result on this rank r of n, whose own values are (r, r, ...)."""
    rank, size = distributed.get_rank(group), distributed.get_world_size(group)
    own = torch.full((2,), float(rank))
    results: dict[str, Any] = {}

    gathered = torch.empty(2 * size)
    distributed.all_gather_into_tensor(gathered, own, group=group)
    results["all_gather_into_tensor"] = gathered.tolist()
    scattered = torch.empty(1)
    distributed.reduce_scatter_tensor(scattered, torch.arange(float(size)), group=group)
    results["reduce_scatter_tensor"] = scattered.tolist()
    root = own.clone()
    distributed.broadcast(root, distributed.get_global_rank(group, size - 1), group=group)
    results["broadcast"] = root.tolist()
    objects: list[Any] = [None] * size
    distributed.all_gather_object(objects, {"rank": rank}, group=group)
    results["all_gather_object"] = objects
    pieces = [torch.empty(2) for _ in range(size)]
    distributed.all_gather(pieces, own, group=group)
    results["all_gather"] = torch.cat(pieces).tolist()
    work: Any = distributed.all_reduce(largest := own.clone(), distributed.ReduceOp.MAX, group=group, async_op=True)
    work.wait()
    results["all_reduce"] = largest.tolist()
    with distributed_c10d._coalescing_manager(group, async_ops=True) as manager:
        first, second = torch.ones(2), torch.full((2,), 2.0)
        distributed.all_reduce(first, group=group)
        distributed.all_reduce(second, group=group)
    manager.wait()
    results["coalesced"] = (first + second).tolist()
    distributed.barrier(group=group)
    if size > 1:
        results["batch_isend_irecv"] = exchange(group, rank, size)
        results["send_recv"] = pass_on(group, rank, size)
    return results


def exchange(group: Any, rank: int, size: int) -> list[float]:
    """What the previous rank of the ring sent."""
    received = torch.empty(2)
    operations = [
        distributed.P2POp(distributed.isend, torch.full((2,), float(rank)), (rank + 1) % size, group),
        distributed.P2POp(distributed.irecv, received, (rank - 1) % size, group),
    ]
    for work in distributed.batch_isend_irecv(operations):
        work.wait()
    return received.tolist()


def pass_on(group: Any, rank: int, size: int) -> list[float]:
    """A value that every rank but the first gets from the one before it and raises by one."""
    value = torch.zeros(1)
    if rank > 0:
        distributed.recv(value, rank - 1, group=group)
        value += 1
    if rank < size - 1:
        distributed.send(value, rank + 1, group=group)
    return value.tolist()


USES: dict[str, Callable[[Any], Any]] = {
    "all_reduce": lambda group: distributed.all_reduce(torch.ones(1), group=group),
    "barrier": lambda group: distributed.barrier(group=group),
    "world": lambda _: distributed.all_reduce(torch.ones(1)),
    "method": lambda group: group.allreduce([torch.ones(1)]),
    "batch": lambda group: distributed.batch_isend_irecv(
        [distributed.P2POp(distributed.isend, torch.ones(1), 0, group)]
    ),
}


def error_of(use: Callable[[Any], Any], group: Any) -> str:
    try:
        use(group)
    except RuntimeError as error:
        return str(error)
    return "no error"
