"""Ranks that do the same work with whole layers and with half of the experts each; used by test_expert_parallel."""

import gc
import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed

from tests.helpers.checkpoint_worker import Case, run_in_group
from tests.helpers.composing import SMALL, config_of
from tests.helpers.data_parallel_worker import OVERLAP, my_share
from tests.helpers.footprint_worker import NO_DISTRIBUTED, ODD, _role_case
from tests.helpers.invariance_worker import run_configs
from tests.helpers.roles import (
    VOCAB_SIZE,
    ddp_buffers,
    fresh_saver,
    loss_of,
    make_batch,
    make_role,
    same_weights,
    train,
    weights_of,
)
from trainer import worker
from trainer.measure.phases import Phases
from trainer.megatron import optimizer, platform
from trainer.megatron.sharding import named_tensors, whole_tensors
from trainer.roles.role import FORWARD, Role
from trainer.training import step
from trainer.training.micro_batches import Split

MOE = (
    *("model.num_experts=4", "model.num_experts_per_tok=2", "model.ffn_size=64"),
    "model.router_aux_loss_coef=0.01",
)
POLICIES = {
    "none": ("offload=none",),
    "full": ("memory=full",),
    "no_grads": ("memory=no_grads",),
    "lean": ("memory=lean",),
    "rebuild": ("memory=rebuild",),
    "overlap": ("memory=rebuild", *OVERLAP),
    "sharded": ("memory=lean", "memory.tags=sharded"),
    "dense_critic": ("memory=lean", "model@roles.critic.model=tiny"),
}
RESPREADS = {
    "tp": ("parallel.tp=2", "parallel.expert=1", "memory.tags=sharded"),
    "pp": ("parallel.pp=2", "parallel.expert=1"),
    "tp_expert": ("parallel.tp=2", "parallel.expert=2", "memory=rebuild"),
    "tp_plain": ("parallel.tp=2", "parallel.expert=1", *NO_DISTRIBUTED),
    "respread": ("parallel.expert=2",),
}
FOOTPRINTS = {
    "lean": (),
    "fp32_odd": ("model.dtype=fp32", *ODD),
    "sharded_odd": ("memory.tags=sharded", *ODD),
    "no_distributed": (*NO_DISTRIBUTED, *ODD),
    "dense_critic": ("model@roles.critic.model=tiny",),
}


def run_replicated(payload: None) -> dict[str, Any]:
    """What ranks compute that hold the same experts as some others."""
    spread = (*MOE, f"launch.nproc={os.environ['WORLD_SIZE']}", "parallel.expert=2", "algo.micro_batch_size=2")
    config = config_of(*SMALL, *spread)
    platform.set_up(config)
    platform.set_up_process_groups(config)
    return {"gradients": gradients(spread), "footprints": footprints(spread), "weights": whole_weights(spread)}


def run_checks(directory: Path) -> dict[str, Any]:
    """Results of every check, on rank 0: key (check, parallel.expert). Communicators go during rollouts."""
    config = config_of(*SMALL, *MOE, "launch.nproc=2", "offload.destroy_process_groups=true")
    platform.set_up(config)
    platform.set_up_process_groups(config)
    results: dict[str, Any] = {}
    for size in (1, 2):
        spread = (*MOE, "launch.nproc=2", f"parallel.expert={size}")
        if size > 1:
            platform.set_up_parallel_groups(config_of(*SMALL, *spread).parallel)
        results["weights", size] = whole_weights(spread)
        results["gradients", size] = gradients(spread)
        results["records", size] = records(spread, size)
        results["checkpoints", size] = checkpoints(directory, spread, size)
    export(directory)
    results["asleep"] = {name: asleep(name, spread) for name in ("actor", "critic")}
    results["policies"] = {
        (policy, name): cycles(name, (*spread, *POLICIES[policy]))
        for policy in ("none", "lean", "rebuild")
        for name in ("actor", "critic")
    }
    results["footprints"] = footprints(spread)
    return results


def footprints(spread: tuple[str, ...]) -> dict[tuple[str, str], dict[str, Any]]:
    """(case, role) -> measured and predicted bytes."""
    return {
        (case, name): _role_case(name, (*spread, *overrides), has_buckets=False)
        for case, overrides in FOOTPRINTS.items()
        for name in ("actor", "critic")
    }


def export(directory: Path) -> None:
    """Read the Hugging Face folder ``start`` and write it again from both ranks' experts."""
    fresh_saver()
    start = f"model.path={directory / 'start'}"
    config = config_of("platform=cpu", "model=hf", start, "launch.nproc=2", "parallel.expert=2")
    run = worker.build(config, Phases(lambda record: None, gpu=False))
    worker.export(run, directory / "exported" if distributed.get_rank() == 0 else None)


def _everyones(value: Any) -> list[Any]:
    found: list[Any] = [None] * distributed.get_world_size()
    distributed.all_gather_object(found, value)
    return found


def whole_weights(overrides: tuple[str, ...]) -> dict[str, Tensor]:
    fresh_saver()
    role = make_role("actor", *overrides)
    return {name: tensor.detach().clone() for name, tensor in whole_tensors(role.model.chunks)}


def _whole_shares(role: Role, kind: str) -> dict[str, Tensor]:
    """Put together from what the optimizers of all ranks hold of each parameter."""
    own = [
        (share.name, share.start, share.tensors[kind].clone())
        for share in optimizer.shares(role.model.optimizer, dict(named_tensors(role.model.chunks)))
    ]
    parts: dict[str, dict[int, Tensor]] = {}
    for name, start, tensor in (share for shares in _everyones(own) for share in shares):
        parts.setdefault(name, {})[start] = tensor
    return {name: torch.cat([found[start] for start in sorted(found)]) for name, found in parts.items()}


def gradients(overrides: tuple[str, ...]) -> dict[tuple[str, str], Any]:
    """(role, kind of optimizer) -> (sums, a tenth of every gradient): Adam's first moment after one step."""
    results = {}
    for name in ("actor", "critic"):
        for kind, extra in (("distributed", ()), ("plain", NO_DISTRIBUTED)):
            fresh_saver()
            role = make_role(name, *overrides, "model.dtype=fp32", "optimizer.clip_grad=0", *extra)
            batch = my_share(make_batch([3, 9, 1, 4]))
            if 2 * distributed.get_rank() >= distributed.get_world_size():  # whose responses are shorter
                batch = batch.cut(8)  # so that the ranks' widths differ
            sums = step.train_minibatch(role, batch, loss_of(role), split=Split(1))
            results[name, kind] = (sums, _whole_shares(role, "exp_avg"))
    return results


def records(overrides: tuple[str, ...], size: int) -> dict[str, Any]:
    """Whole jobs: in fp32 to be compared with the other way to spread, in bf16 under every policy."""
    cases = {"fp32": ("model.dtype=fp32", "offload=none"), **(POLICIES if size > 1 else {})}
    return run_configs({case: config_of(*SMALL, *overrides, *extra) for case, extra in cases.items()})


def checkpoints(directory: Path, overrides: tuple[str, ...], size: int) -> dict[str, Any]:
    """Jobs that save after each step: unbroken, resumed, and what the other way to spread saved, saved again by one
    layout after another."""
    saving = (*SMALL, *overrides, "checkpoint.every_steps=1", "checkpoint.keep_last=9")
    lean, rebuild = (config_of(*saving, f"memory={policy}") for policy in ("lean", "rebuild"))
    own, other = (directory / f"spread_{n}" / "checkpoints" for n in (size, 3 - size))
    cases = [Case("unbroken", lean, own.parent)]
    if size > 1:
        shared = config_of(*saving, "memory=lean", "memory.tags=sharded", "checkpoint.async_save=true")
        cases.append(Case("resumed", rebuild, directory / "resumed", own / "step_1"))
        cases.append(Case("resumed_sharded", shared, directory / "resumed_sharded", own / "step_1"))
        last = other / "step_2"
        for name, layout in RESPREADS.items():
            run = directory / name
            cases.append(Case(name, config_of(*saving, *layout), run, last, copy_only=True))
            last = run / "checkpoints/step_2"
    return run_in_group(cases)


def asleep(name: str, overrides: tuple[str, ...], *, lengths: tuple[int, ...] = (90, 5)) -> dict[str, Any]:
    """Where the storages of a sleeping role lie, if they are of 8 KiB or more (states of generators are of five)."""
    from torch_memory_saver import torch_memory_saver

    def alive() -> list[Tensor]:
        gc.collect()
        return [thing for thing in gc.get_objects() if issubclass(type(thing), Tensor)]

    fresh_saver()
    before = {tensor.untyped_storage().data_ptr() for tensor in alive()}
    role = make_role(name, *overrides)
    buffers = {
        "dense": [str(buffer.param_dtype) for chunk in role.model.chunks for buffer in chunk.buffers],
        "experts": [str(buffer.param_dtype) for chunk in role.model.chunks for buffer in chunk.expert_parallel_buffers],
    }
    regions = {
        torch_memory_saver._impl.region_of(data)[0]
        for buffer in ddp_buffers(role)
        for data in (buffer.param_data, buffer.grad_data)
    }
    train(role, lengths=lengths)
    role.sleep()
    arenas = [arena for arena, _ in role._weights.backuper._tags.values()] if role._weights.backuper else []
    known = before | {arena._flat.data_ptr() for arena in [*arenas, role.regions._keeper._store._arena]}
    loose = [
        (tuple(tensor.shape), str(tensor.dtype))
        for tensor in alive()
        if tensor.untyped_storage().nbytes() >= 1 << 13
        and tensor.untyped_storage().data_ptr() not in known
        and torch_memory_saver._impl.region_of(tensor) is None
    ]
    return {"buffers": buffers, "regions": regions, "loose": loose}


def cycles(name: str, overrides: tuple[str, ...]) -> list[Any]:
    """Digests of all ranks after training, sleeping, waking up as the reference and as itself, and training on."""
    fresh_saver()
    role = make_role(name, *overrides)
    if role._weights.backuper:
        role.copy_to_tag("ref")
    start, history = weights_of(role), []
    for _ in range(2):
        train(role)
        trained = weights_of(role)
        history.append(_everyones(role.weights_sha256()))
        role.sleep()
        if role._weights.backuper:
            with role.awake(kinds=FORWARD, tag="ref"):
                assert same_weights(weights_of(role), start)
                numbers, _ = step.log_probs(
                    role, make_batch([3, 5]), temperature=1.0, vocab_size=VOCAB_SIZE, split=Split(2)
                )
                history.append(numbers.sum().item())
        role.wake_up(kinds=FORWARD)
        assert same_weights(weights_of(role), trained)
        role.sleep()
        role.wake_up()
        history.append(_everyones(role.weights_sha256()))
    role.load_weights({key: weight + 0.01 for key, weight in weights_of(role).items()})
    role.model.set_learning_rate(0.0)
    loaded = weights_of(role)
    step.train_minibatch(role, make_batch([3, 5]), loss_of(role), split=Split(2))
    assert same_weights(weights_of(role), loaded)
    return history
