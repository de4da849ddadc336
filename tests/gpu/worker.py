"""Scenarios that need the real torch_memory_saver; each runs in a fresh worker and returns plain numbers."""

import gc
from collections.abc import Callable
from typing import Any

import psutil
import torch

from trainer import platform
from trainer.config import Config

GIB = 2**30


def run_scenario(payload: tuple[str, Config]) -> dict[str, Any]:
    """Set up the platform and run the scenario of that name."""
    name, config = payload
    platform.set_up(config)
    platform.set_up_process_groups(config)
    return SCENARIOS[name](config)


def _roles(config: Config) -> tuple[Any, Any]:
    from trainer.memory.arena import HostArenas
    from trainer.memory.saver import make_saver
    from trainer.plan import make_plan
    from trainer.role import Role

    saver, plan, arenas = make_saver(config), make_plan(config), HostArenas(pinned=config.offload.train)
    roles = [
        Role(name, config, plan=plan, saver=saver, vocab_size=512, seed=seed, observer=_ignore, arenas=arenas)
        for seed, name in enumerate(("actor", "critic"))
    ]
    return roles[0], roles[1]


def _ignore(event: dict[str, Any]) -> None:
    pass


def _train_once(role: Any) -> None:
    tokens = torch.randint(0, 512, (2, 16), device="cuda")
    positions = torch.arange(16, device="cuda").expand_as(tokens)
    with role.training():
        role.chunks[0](tokens, positions, None).float().square().mean().backward()
        role.chunks[0].finish_grad_sync()
    role.step()


def _gpu_used_bytes() -> int:
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    return total - free


def _weights(role: Any) -> dict[str, torch.Tensor]:
    from trainer.models.build import named_tensors

    return {name: tensor.detach().clone() for name, tensor in named_tensors(role.chunks)}


def cycles(config: Config) -> dict[str, Any]:
    """Ten sleep and wake-up cycles of both roles, each with an optimizer step in between."""
    actor, critic = _roles(config)
    asleep_gpu, asleep_rss, kept = [], [], []
    for _ in range(10):
        for role in (actor, critic):
            before = role.weights_sha256()
            role.sleep()
            role.wake_up()
            kept.append(role.weights_sha256() == before)
            _train_once(role)
        actor.sleep()
        critic.sleep()
        asleep_gpu.append(_gpu_used_bytes())
        asleep_rss.append(psutil.Process().memory_info().rss)
        actor.wake_up()
        critic.wake_up()
    parameters = actor.parameter_count() + critic.parameter_count()
    return {"kept": kept, "asleep_gpu": asleep_gpu, "asleep_rss": asleep_rss, "parameters": parameters}


def wrong_calls(config: Config) -> dict[str, Any]:
    """Sleep twice, wake twice, wake first, allocate while asleep, no room: errors or no-ops, never a dead process."""
    actor, critic = _roles(config)
    critic.wake_up()
    digest = actor.weights_sha256()
    actor.sleep()
    actor.sleep()
    errors = []
    for action in (actor.switch_to, actor.require):
        try:
            action("ref") if action == actor.switch_to else action(("param",))
        except RuntimeError as error:
            errors.append(str(error))
    free, _ = torch.cuda.mem_get_info()
    hog = torch.empty(free - GIB // 4, dtype=torch.uint8, device="cuda")
    critic_digest = critic.weights_sha256()
    try:
        actor.wake_up()
    except MemoryError as error:
        errors.append(str(error))
    del hog
    torch.cuda.empty_cache()
    made_while_asleep = torch.ones(1 << 20, device="cuda")
    actor.wake_up()
    actor.wake_up()
    return {
        "errors": errors,
        "kept": actor.weights_sha256() == digest and critic.weights_sha256() == critic_digest,
        "other": float(made_while_asleep.sum()),
    }


def every_path(config: Config) -> dict[str, Any]:
    """GPU bytes in use while both roles sleep, after every path that wakes somebody."""
    actor, critic = _roles(config)
    _train_once(actor)
    _train_once(critic)
    used = {}

    def asleep(path: str) -> None:
        actor.sleep()
        critic.sleep()
        used[path] = _gpu_used_bytes()

    asleep("init")
    with actor.awake():
        _train_once(actor)
        actor.backup()
    asleep("train")
    with actor.awake(kinds={"param"}):
        own = _weights(actor)
        actor.copy_to_tag("ref")
        actor.switch_to("ref")
        used["ref_differs"] = sum(not torch.equal(tensor, own[name]) for name, tensor in _weights(actor).items())
    asleep("switch")
    with critic.awake():
        tokens = torch.zeros(1, 8, dtype=torch.long, device="cuda")
        with critic.training():
            critic.chunks[0](tokens, tokens, None).float().mul(float("inf")).sum().backward()
            critic.chunks[0].finish_grad_sync()
        updated, _ = critic.step()
        used["failed_step_updated"] = updated
    asleep("failed step")
    try:
        with actor.awake():
            raise KeyError("a failing step")
    except KeyError:
        pass
    asleep("exception")
    return used


def storages(config: Config) -> dict[str, Any]:
    """Bytes of every CUDA storage over 1 MiB that lies in no region, with both roles awake."""
    import torch_memory_saver

    actor, critic = _roles(config)
    _train_once(actor)
    _train_once(critic)
    pools = torch_memory_saver.torch_memory_saver._impl._mem_pools.values()
    segments = [(s["address"], s["address"] + s["total_size"]) for pool in pools for s in pool.snapshot()]
    uncovered = {}
    for tensor in (item for item in gc.get_objects() if isinstance(item, torch.Tensor) and item.is_cuda):
        storage = tensor.untyped_storage()
        covered = any(start <= storage.data_ptr() < end for start, end in segments)
        if storage.nbytes() > 2**20 and not covered:
            uncovered[str(storage.data_ptr())] = storage.nbytes()
    return {"uncovered": uncovered, "roles": [actor.name, critic.name], "segments": len(segments)}


SCENARIOS: dict[str, Callable[[Config], dict[str, Any]]] = {
    scenario.__name__: scenario for scenario in (cycles, wrong_calls, every_path, storages)
}
