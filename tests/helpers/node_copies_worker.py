"""The ranks that share copies of weights tags, and look at each other's memory; used by test_node_copies."""

import os
import re
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import distributed

from tests.helpers.composing import SMALL, config_of, footprint_of
from tests.helpers.recording import recorded
from tests.helpers.roles import VOCAB_SIZE, fresh_saver, make_role, small_config, train, weights_of
from trainer import loop, worker
from trainer.measure.phases import Phases
from trainer.megatron import platform
from trainer.memory.arena import HostArenas, SharedArena
from trainer.roles.backuper import TensorBackuper

MODEL = ("model.hidden_size=128", "model.ffn_size=256", "memory=lean", "memory.tags=node", "algo.micro_batch_size=1")
PLAIN = tuple(f"roles.{role}.ddp.use_distributed_optimizer=false" for role in ("actor", "critic"))
APART = ("launch.nproc=2", "parallel.cp=2", "offload=auto", "memory.tags=node", "launch.gpu_memory_gib=0.0045")
TWO_NODES = ("launch.nproc=2", "launch.nnodes=2", "launch.node_rank=0", "launch.rdzv_endpoint=a:1")


def run_checks(payload: None) -> dict[str, Any]:
    """What each check returns on every rank, in their order."""
    size = distributed_ranks()
    whole = (*MODEL, f"launch.nproc={size}")
    cases: dict[str, tuple[str, ...]] = {"dp": whole, "plain": (*whole, *PLAIN)}
    if size == 4:
        spread = ("model.num_experts=4", "model.num_experts_per_tok=2", "parallel.expert=2")
        cases = {"tp": (*whole, "parallel.tp=2"), "nodes": (*MODEL, *TWO_NODES), "experts": (*whole, *spread)}
    platform.set_up(small_config(*whole))
    platform.set_up_process_groups(small_config(*whole))
    checks: dict[str, Callable[[], Any]] = {name: lambda o=o: held(o) for name, o in cases.items()}
    if size == 2:
        checks |= {"late writer": late_writer, "late reader": late_reader, "moves": moves, "apart": measured_apart}
    return {name: _of_all_ranks(check()) for name, check in checks.items()}


def distributed_ranks() -> int:
    return int(os.environ["WORLD_SIZE"])


def held(overrides: tuple[str, ...]) -> dict[str, Any]:
    """Of an actor with two tags that sleeps: what the operating system counts for the memory behind them, and what the
    plan does; and the weights that came back."""
    config = small_config(*overrides)
    platform.set_up_parallel_groups(config.parallel)
    fresh_saver()
    role = make_role("actor", *overrides, arenas=HostArenas.of(config))
    role.copy_to_tag("ref")
    before = weights_of(role)
    train(role)
    trained = weights_of(role)
    found = []
    for tag, expected in (("ref", before), ("actor", trained)):
        role.sleep()
        role.wake_up(tag=tag)
        found.append(all(torch.equal(tensor, expected[name]) for name, tensor in weights_of(role).items()))
    role.sleep()
    holdings = footprint_of(config, vocab_size=VOCAB_SIZE).of_role("actor")
    kept = {h.kind: h.host_asleep_bytes for h in holdings if h.keeper == "backuper"}
    distributed.barrier()  # all have all pages mapped
    measured = shared_mappings()
    distributed.barrier()
    return {"restored": found, "same": not _same(before, trained), "planned": sum(kept.values()), "measured": measured}


def _same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(tensor, other[name]) for name, tensor in one.items())


def shared_mappings() -> dict[int, tuple[int, int]]:
    """Inode of memory that arenas share -> (its size, this process's proportional share of it), in bytes."""
    found: dict[int, tuple[int, int]] = {}
    inode = None
    for line in Path("/proc/self/smaps").read_text().splitlines():
        fields = line.split()
        if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
            is_shared = "/memfd:torpor" in line
            inode = int(fields[4]) if is_shared else None
        elif inode is not None and fields[0] in ("Size:", "Pss:"):
            size, pss = found.get(inode, (0, 0))
            amount = int(fields[1]) * 1024
            found[inode] = (size + amount, pss) if fields[0] == "Size:" else (size, pss + amount)
    return found


def _backuper(value: float) -> tuple[torch.Tensor, TensorBackuper, HostArenas]:
    arenas = HostArenas.of(small_config(*MODEL, f"launch.nproc={distributed_ranks()}"))
    tensor = torch.full((1001,), value)
    backuper = TensorBackuper.create(source_getter=lambda: [("x", tensor), ("scalar", tensor[0])], arenas=arenas)
    backuper.backup("tag")
    return tensor, backuper, arenas


def late_writer() -> list[float]:
    """What comes back of a backup that the second rank begins when the first one already restores."""
    tensor, backuper, _ = _backuper(1.0)
    tensor.fill_(2.0)
    if distributed.get_rank() == 1:
        time.sleep(0.5)
    backuper.backup("tag")
    tensor.fill_(0.0)
    backuper.restore("tag")
    return sorted(set(tensor.tolist()))


def late_reader() -> list[float]:
    """What the second rank reads while the first one has done so and backs up anew."""
    tensor, backuper, _ = _backuper(1.0)
    arena, copies = backuper._tags["tag"]
    with arena.reading():
        if distributed.get_rank() == 1:
            time.sleep(0.5)
        found = sorted(set(copies["x"].tolist()))
    tensor.fill_(2.0)
    backuper.backup("tag")
    distributed.barrier()
    return found


def moves() -> dict[str, Any]:
    """A tag goes to the device and comes back, and is copied there and here; host bytes of both tags after each."""
    tensor, backuper, _ = _backuper(3.0)
    host_bytes = [backuper.bytes_of("tag")]
    if distributed.get_rank() == 1:
        time.sleep(0.2)
    backuper.place(["tag"])
    backuper.copy(src_tag="tag", dst_tag="other")
    host_bytes += [backuper.bytes_of("tag"), backuper.bytes_of("other")]
    backuper.place([])
    host_bytes += [backuper.bytes_of("tag")]
    found = []
    for tag in ("tag", "other"):
        tensor.fill_(0.0)
        backuper.restore(tag)
        found += sorted(set(tensor.tolist()))
    return {"host_bytes": host_bytes, "found": found}


def measured_apart() -> dict[str, Any]:
    """Where the tags of a scheduled run lie whose ranks share sequences and of which one has less room than the other,
    as the first step shows: before and after."""
    config = config_of(*SMALL, *APART)
    platform.set_up_parallel_groups(config.parallel)
    fresh_saver()
    outputs, _ = recorded()
    run = worker.build(config, Phases(lambda event: None, gpu=False))
    turns: Any = run.phases.turns
    turns._outside_bytes = lambda: 2_500_000 * distributed.get_rank()
    before = turns.schedule.resident_tags
    loop.train(run, outputs)
    reserves = {phase.reserve_bytes for phase in turns.schedule.phases}
    return {"before": before, "after": turns.schedule.resident_tags, "reserves": reserves}


def _of_all_ranks(value: Any) -> list[Any]:
    values: list[Any] = [None] * distributed.get_world_size()
    distributed.all_gather_object(values, value)
    return values


def hold_until_killed(size_bytes: int) -> None:
    """Fills an arena that two ranks share, says so, and waits."""
    group: Any = distributed.new_group(backend="gloo")
    arena = SharedArena(size_bytes, ranks=group, pinned=False)
    arena.own_share(arena.whole).fill_(1)
    with arena.reading():
        assert int(arena.whole.sum(dtype=torch.int64)) == size_bytes
    print("holds", flush=True)
    signal.pause()


if __name__ == "__main__":
    rank, store_path, size = int(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    store = distributed.FileStore(store_path, 2)
    distributed.init_process_group("gloo", store=store, rank=rank, world_size=2)
    hold_until_killed(size)
