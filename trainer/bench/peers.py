"""How others offload, re-enacted for comparison. Nothing here is part of the product, which never imports it.

- :class:`MegatronOffload` calls megatron-core's own functions (https://github.com/NVIDIA/Megatron-LM).
- :class:`SlimeLike` follows slime (https://github.com/THUDM/slime) with its flags for DDP buffers without a backup: a
  pinned copy per tensor for the actor, the saver for the rest. Left out: slime also destroys its NCCL groups.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from patches.ddp_buffer_backup import RegionFor
from trainer.config.roles import role_spec, trained_role
from trainer.config.schema import Config
from trainer.megatron import optimizer as optimizers
from trainer.megatron.build import build_chunks, drop_caches, move_rest, wrap_ddp
from trainer.megatron.sharding import ddp_buffers
from trainer.memory.arena import HostArenas
from trainer.memory.regions import MemoryObserver, RoleRegions
from trainer.memory.saver import Saver
from trainer.plan import KINDS, Plan
from trainer.roles.model import ModelChunks
from trainer.roles.role import Role


@dataclass(frozen=True)
class Parts:
    """What a role is built from besides its config, as in :class:`trainer.roles.role.Role`."""

    plan: Plan
    saver: Saver
    vocab_size: int
    seed: int
    observer: MemoryObserver
    arenas: HostArenas


class _PeerModel(ModelChunks):
    """What the benchmark calls on the model of a role (:class:`trainer.roles.model.RoleModel`)."""

    def optimizer_tensors(self) -> Iterator[torch.Tensor]:
        """Main params and moments, in a fixed order."""
        for inner in optimizers.inner_optimizers(self.optimizer):
            for group in inner.optimizer.param_groups:
                for param in group["params"]:
                    yield param.data
                    yield from (value for value in inner.optimizer.state[param].values() if torch.is_tensor(value))


class _Peer:
    """What the benchmark calls on a role. Megatron's optimizer stays as Megatron makes it."""

    def __init__(self, name: str, config: Config, *, parts: Parts, region_for: RegionFor | None = None) -> None:
        self.name, self._config, self._parts = name, trained_role(config, name), parts
        gpts = build_chunks(
            self._config.model,
            vocab_size=parts.vocab_size,
            parallel=config.parallel,
            seed=parts.seed,
            value_head=role_spec(config, name).has_value_head,
        )
        grad, param = (bool(parts.plan.row(name, kind).flag) for kind in ("grad", "param"))
        how = {"disable_grad_backup": grad, "disable_param_backup": param, "region_for": region_for}
        self.model = _PeerModel([wrap_ddp(gpt, self._config.ddp, **how) for gpt in gpts])

    @contextmanager
    def training(self) -> Iterator[None]:
        self.model.zero_grads()
        yield

    def step(self) -> tuple[bool, float]:
        return optimizers.step(self.model.optimizer)


class MegatronOffload(_Peer):
    """DDP buffers through ``_ParamAndGradBuffer.offload_to_cpu``, the state through ``optimizer.offload_to_cpu``."""

    def __init__(self, name: str, config: Config, *, parts: Parts) -> None:
        super().__init__(name, config, parts=parts)
        self.model.optimizer = optimizers.megatron_optimizer(self.model.chunks, self._config)
        self._buffers = ddp_buffers(self.model.chunks)

    def sleep(self) -> None:
        self.model.drop_grads()
        self.model.optimizer.offload_to_cpu()  # first, since fp32 main params are views of the parameter buffer
        for buffer in self._buffers:
            buffer.offload_to_cpu()
        torch.cuda.empty_cache()
        self._record("asleep")

    def wake_up(self) -> None:
        for buffer in self._buffers:
            buffer.reload_from_cpu()
        self.model.optimizer.restore_from_cpu()
        self._record("awake")

    def _record(self, state: str) -> None:
        params = [buffer.param_data_cpu for buffer in self._buffers if buffer.param_data_cpu is not None]
        optim = sum(tensor.nbytes for tensor in self.model.optimizer_tensors())
        sizes = {"param": sum(_pinned_bytes(tensor) for tensor in params), "optim": optim}
        for kind, size in sizes.items():
            self._parts.observer({"role": self.name, "kind": kind, "state": state, "backup_bytes": size})


class SlimeLike(_Peer):
    """Regions as under ``memory=lean``, but dead blocks of the first step and power-of-two copies stay in them."""

    def __init__(self, name: str, config: Config, *, parts: Parts) -> None:
        self._regions = RoleRegions(name, plan=parts.plan, saver=parts.saver, observer=parts.observer)
        super().__init__(name, config, parts=parts, region_for=self._regions.of_ddp_buffer)
        move_rest(self.model.chunks, self._regions.region("rest"))
        with self._regions.optimizer_region(0):
            self.model.optimizer = optimizers.megatron_optimizer(self.model.chunks, self._config)
        self._has_state = False
        self._copies: dict[str, torch.Tensor] = {}
        if role_spec(config, name).has_backuper:
            for key, tensor in self.model.tensors().items():
                self._copies[key] = torch.empty_like(tensor, device="cpu", pin_memory=parts.arenas.pinned)

    def step(self) -> tuple[bool, float]:
        if self._has_state:
            return super().step()
        self._has_state = True
        with self._regions.optimizer_region(1):
            return super().step()

    def sleep(self) -> None:
        for key, tensor in self.model.tensors().items() if self._copies else ():
            self._copies[key].copy_(tensor.detach(), non_blocking=True)
        self.model.drop_grads()
        drop_caches()
        torch.cuda.synchronize()
        gc.collect()
        torch.cuda.empty_cache()
        self._regions.sleep(KINDS, backuper_bytes=self._backuper_bytes())

    def wake_up(self) -> None:
        self._regions.wake_up(KINDS, backuper_bytes=self._backuper_bytes())
        with torch.no_grad():
            for key, tensor in self.model.tensors().items() if self._copies else ():
                tensor.copy_(self._copies[key], non_blocking=True)
        torch.cuda.synchronize()

    def _backuper_bytes(self) -> dict[str, int]:
        copies = self._copies.values()
        return {"param": sum(_pinned_bytes(copy) if self._parts.arenas.pinned else copy.nbytes for copy in copies)}


BenchRole = Role | MegatronOffload | SlimeLike


def _pinned_bytes(tensor: torch.Tensor) -> int:
    """torch's pinned allocator rounds every tensor up to a power of two."""
    return 1 << (tensor.nbytes - 1).bit_length()
