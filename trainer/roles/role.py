"""A role: model, optimizer and weights backuper, and their sleep and wake-up.

What each buffer comes back from is the plan's; this module carries it out. A forward pass between a region's wake-up
and the restore of its bytes is impossible through the public methods: :meth:`Role.wake_up` does both or raises.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any, TypeVar

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.models.gpt import GPTModel
from torch import distributed

from trainer.common.seeds import seed_for
from trainer.config.roles import role_spec, trained_role
from trainer.config.schema import Config, DdpConfig
from trainer.megatron import optimizer as optimizers
from trainer.megatron.build import FrozenChunk, build_chunks, drop_caches, move_rest, wrap_ddp
from trainer.megatron.moe import drop_routing
from trainer.megatron.param_shards import ParamShards
from trainer.megatron.sharding import OwnParts, Share, named_tensors, whole_tensors
from trainer.memory.arena import HostArenas
from trainer.memory.regions import MemoryObserver, RoleRegions
from trainer.memory.saver import Saver
from trainer.plan import KINDS, Plan, weights_kind
from trainer.roles.backuper import TensorBackuper
from trainer.roles.digest import digest

TRAINING = frozenset(KINDS)
FORWARD = frozenset({"param"})
MIB = 2**20
Result = TypeVar("Result")


class Role:
    """Build it awake, then :meth:`wake_up` and :meth:`sleep`. ``kinds`` are buffer kinds of :mod:`trainer.plan`;
    ``param`` brings ``rest`` along, since no forward pass works without both."""

    def __init__(
        self,
        name: str,
        config: Config,
        *,
        plan: Plan,
        saver: Saver,
        vocab_size: int,
        seed: int,
        observer: MemoryObserver,
        arenas: HostArenas,
    ) -> None:
        self.name, self.spec, self.config = name, role_spec(config, name), config.roles[name]
        self._saver, self._trains_alone = saver, config.world_size == 1
        self._computes_alone = config.parallel.model_ranks == config.parallel.expert == 1
        self._plan, self._regions = plan, RoleRegions(name, plan=plan, saver=saver, observer=observer)
        self._rebuilds = plan.row(name, "param").keeper == "main_params"
        gpts = build_chunks(
            self.config.model,
            vocab_size=vocab_size,
            parallel=config.parallel,
            seed=seed,
            value_head=self.spec.has_value_head,
            recompute=config.training.recompute if self.spec.is_trained else "none",
        )
        trained = trained_role(config, name) if self.spec.is_trained else None
        self.chunks: list[Any] = [FrozenChunk(gpt) if trained is None else self._wrap(gpt, trained.ddp) for gpt in gpts]
        move_rest(self.chunks, self._regions.region("rest"))
        self._gathers_in_forward = trained is not None and trained.ddp.overlap_param_gather
        if trained is not None:
            self.optimizer, self._state = optimizers.build_optimizer(
                self.chunks,
                trained,
                region=self._regions.optimizer_region,
                piece_bytes=int(config.memory.piece_mib * MIB),
            )
            self._regions.keep_optimizer_state(
                self._state.pieces,
                main_pieces=self._state.main_pieces,
                config=config,
                arenas=arenas,
                rounding_seed=functools.partial(self._rounding_seed, config.seed),
            )
            self._set_param_hooks(enabled=False)
        self.backuper: TensorBackuper | None = None
        self._active_tag: str | None = name
        self._trained_since_backup, self._trains = True, False
        if self.spec.has_backuper:
            is_shared = config.memory.tags == "sharded" and self.spec.is_trained
            self.backuper = TensorBackuper.create(
                source_getter=lambda: named_tensors(self.chunks),
                single_tag=None,
                arenas=arenas,
                layout=ParamShards(self.chunks) if is_shared else None,
            )
            self._regions.count(self.backuper.copies)
            self._backup_if_trained()
        saver.turns.add(self)

    def _wrap(self, gpt: GPTModel, ddp: DdpConfig) -> DistributedDataParallel:
        grad, param = (bool(self._plan.row(self.name, kind).flag) for kind in ("grad", "param"))
        region_for = self._regions.of_ddp_buffer
        return wrap_ddp(gpt, ddp, disable_grad_backup=grad, disable_param_backup=param, region_for=region_for)

    def _rounding_seed(self, seed: int, piece: int) -> int:
        step, rank = optimizers.step_count(self.optimizer), distributed.get_rank()
        return seed_for(seed, f"rounding/{self.name}/{piece}", step=step, rank=rank)

    # ---- sleep and wake-up -------------------------------------------------------------------------------------

    @property
    def active_tag(self) -> str | None:
        """The weights tag that lies in the parameters; None while they sleep."""
        return self._active_tag

    def is_asleep(self, kind: str) -> bool:
        return self._regions.is_asleep(kind)

    def prepare_sleep(self) -> None:
        """Page-lock now what the first sleep would page-lock. A role that sleeps as soon as it is built has no use
        for it."""
        self._regions.prepare_sleep()

    def sleep(self, *, kinds: Collection[str] = TRAINING) -> None:
        """Release the buffers of ``kinds`` (those asleep already stay so). Weights trained since the last backup are
        backed up first.

        Raises:
            ValueError: an unknown kind.
            RuntimeError: inside :meth:`training`; so do all methods that make the role sleep or change its weights.
        """
        self._refuse_in_training("sleep")
        kinds = self._with_rest(kinds)
        goes_to_sleep = "param" in kinds and self._plan.sleeps and not self.is_asleep("rest")
        if goes_to_sleep:
            self._backup_if_trained()
            drop_caches()
            drop_routing(self.chunks)
            self._active_tag = None  # before the first region goes: a sleep that fails half-way must not leave it set
        if "grad" in kinds and self.spec.is_trained:
            self.optimizer.zero_grad(set_to_none=True)
        self._regions.sleep(kinds, backuper_bytes=self._backuper_bytes())
        if goes_to_sleep:
            self._record_extra_tags()

    def wake_up(self, *, kinds: Collection[str] = TRAINING, tag: str | None = None) -> None:
        """Map the buffers of ``kinds`` again and restore what must be restored.

        Parameters end up holding the weights of ``tag`` (default: the role's own); waking straight to another tag
        restores nothing else first. Gradients are undefined until they are zeroed.

        Raises:
            ValueError: an unknown kind, or a tag that is not backed up.
            MemoryError: the device has too little free memory; nothing was woken.
            RuntimeError: inside :meth:`training`.
        """
        self._refuse_in_training("wake_up")
        tag = tag or self.name
        self._check_tag(tag)
        kinds = self._with_rest(kinds)
        needs_main_params = "param" in kinds and self._rebuilds and tag == self.name
        if needs_main_params and self._regions.keeper_of_sleeping_state is None:
            kinds = kinds | {"optim"}
        self._saver.turns.map(
            self.name, kinds, lambda: self._regions.wake_up(kinds, backuper_bytes=self._backuper_bytes())
        )
        if "param" in kinds and self._active_tag != tag:
            self._backup_if_trained()
            self._switch_model(tag)

    @contextmanager
    def awake(self, *, kinds: Collection[str] = TRAINING, tag: str | None = None) -> Iterator[None]:
        """Awake inside, asleep after, also when the body raises, unless a schedule lets it stay awake for now."""
        self._refuse_in_training("awake")
        try:
            self.wake_up(kinds=kinds, tag=tag)
            yield
        finally:
            self._saver.turns.done(self)

    def start_saving(self) -> None:
        """Begin to copy the awake optimizer state to its keeper, beside other work; nothing to do if that is the
        saver."""
        self._regions.start_saving()

    def fetch(self) -> None:
        """Map the sleeping optimizer state and begin to copy it back, beside other work."""
        self._regions.wake_up({"optim"}, backuper_bytes={})

    def place_tags(self, tags: Collection[str]) -> None:
        """Keep the copies of ``tags`` in GPU memory, and those of all others in host memory."""
        if self.backuper is not None:
            self.backuper.place(tags)

    def repeated(self, work: Callable[[], Result], *, trains: bool = False) -> Result:
        """What ``work``, passes of this role, returns; see :class:`trainer.memory.turns.Turns`."""
        is_alone = self._trains_alone if trains else self._computes_alone
        return self._saver.turns.repeated(work, is_collective=not is_alone)

    @contextmanager
    def readable(self) -> Iterator[list[Share]]:
        """This rank's shares of all that a checkpoint holds, as the last step left it, valid inside; asleep after.

        Their kinds are ``weights``, the backuper's further tags, and those that
        :func:`trainer.megatron.optimizer.shares` names.
        What host memory holds of a sleeping role is read there, and only the rest wakes up.
        """
        self._refuse_in_training("readable")
        keeper, backed_up = self._regions.keeper_of_sleeping_state, None
        pieces = keeper.host_tensors() if keeper is not None else None
        if self.backuper is not None and self.name in self.backuper.backup_tags and self.is_asleep("rest"):
            backed_up = self.backuper.get(self.name)
        try:
            self.wake_up(kinds=(FORWARD if backed_up is None else set()) | ({"optim"} if pieces is None else set()))
            if pieces is None:
                self._regions.wait_for_optimizer_state()
                pieces = self._state.pieces
            own = dict(named_tensors(self.chunks))
            weights = _shares_of(own) if backed_up is None else self._shares_of_tag(self.name, kind="weights")
            found = own if backed_up is None else backed_up
            state = [
                self._state.share_in(pieces, share, weights=found) for share in optimizers.shares(self.optimizer, own)
            ]
            yield [*weights, *self._shares_of_further_tags(), *state]
        finally:
            self._saver.turns.done(self)

    @contextmanager
    def overwriting(self, *, tags: Collection[str]) -> Iterator[list[Share]]:
        """The same of an awake role, to be filled inside, with ``tags`` as its further tags."""
        self._refuse_in_training("overwriting")
        self.require(TRAINING, tag=self.name)
        self._regions.will_change()
        for tag in tags:
            assert self.backuper is not None, f"the {self.name} has no weights backuper, so no tags {tags}"
            self.backuper.backup(tag)
        own = dict(named_tensors(self.chunks))
        yield [*_shares_of(own), *self._shares_of_further_tags(), *optimizers.shares(self.optimizer, own)]
        self._trained_since_backup = True
        self._backup_if_trained()

    @property
    def further_tags(self) -> list[str]:
        """Of the weights backuper: those beside the role's own."""
        return [tag for tag in self.backuper.backup_tags if tag != self.name] if self.backuper else []

    def _shares_of_further_tags(self) -> list[Share]:
        return [share for tag in self.further_tags for share in self._shares_of_tag(tag, kind=tag)]

    def _shares_of_tag(self, tag: str, *, kind: str) -> list[Share]:
        assert self.backuper is not None
        return [Share(name, start, {kind: part}) for name, start, part in self.backuper.parts(tag)]

    def switch_to(self, tag: str) -> None:
        """Put the weights of ``tag`` into the awake parameters, e.g. "ref" and back to "actor"."""
        self._refuse_in_training("switch_to")
        self.require(FORWARD)
        self._check_tag(tag)
        if tag == self.name and self._rebuilds and self._regions.keeper_of_sleeping_state is None:
            self.wake_up(kinds={"optim"})  # the saver keeps it, and it is read
        self._backup_if_trained()
        self._switch_model(tag)

    def _switch_model(self, tag: str) -> None:
        """Restore ``tag``, even if it is the active one: after a wake-up the parameters may hold anything."""
        if tag == self.name and self._rebuilds:
            with self._regions.restoring(self._weights_kind):
                self._rebuild_params()
        elif self.backuper is not None:
            with self._regions.restoring(self._weights_kind):
                self.backuper.restore(tag)
        self._active_tag = tag

    def _rebuild_params(self) -> None:
        keeper = self._regions.keeper_of_sleeping_state
        self._regions.wait_for_optimizer_state(main_params_only=True)
        with nullcontext() if keeper is None else self._state.main_params_from(keeper.read_main_params()):
            optimizers.copy_main_to_model_params(self.optimizer, self.chunks)

    def _check_tag(self, tag: str) -> None:
        if tag == self.name:
            return
        if self.backuper is None:
            raise ValueError(f"the {self.name} has no weights backuper, so no tag {tag!r}")
        self.backuper.get(tag)

    def _with_rest(self, kinds: Collection[str]) -> frozenset[str]:
        unknown = sorted(set(kinds) - set(KINDS))
        if unknown:
            raise ValueError(f"unknown buffer kinds {', '.join(unknown)}; kinds are {', '.join(KINDS)}")
        return frozenset(kinds) | ({"rest", "param"} if {"param", "rest"} & set(kinds) else set())

    # ---- weights backuper --------------------------------------------------------------------------------------

    def _backuper_bytes(self) -> dict[str, int]:
        """Buffer kind -> host bytes that the backuper keeps in its stead."""
        kind = self._weights_kind
        if self.backuper is None or self._plan.row(self.name, kind).keeper != "backuper":
            return {}
        return {kind: self.backuper.bytes_of(self.name)}

    @property
    def _weights_kind(self) -> str:
        """The buffer kind in which most parameters lie."""
        return weights_kind(self._plan, self.name)

    def _record_extra_tags(self) -> None:
        """Record the host bytes of backups beside the one that restores the role's own parameters."""
        for tag in self.backuper.backup_tags if self.backuper else ():
            if not (tag == self.name and self._backuper_bytes()):
                assert self.backuper is not None
                self._regions.record(
                    f"weights/{tag}",
                    state="asleep",
                    flag=None,
                    keeper="backuper",
                    released_bytes=0,
                    backup_bytes=self.backuper.bytes_of(tag),
                    seconds=0.0,
                )

    def backup(self) -> None:
        """``backup("actor")`` after a training phase; nothing to do for a role whose parameters are rebuilt or that has
        no backuper."""
        self._refuse_in_training("backup")
        self.require(FORWARD)
        if not self._saver.turns.keeps_awake:  # else it waits for the switch or the sleep that needs it
            self._backup_if_trained()
            self._regions.start_saving()

    def _backup_if_trained(self) -> None:
        keeps_own_tag = self.backuper is not None and not self._rebuilds
        if keeps_own_tag and self._trained_since_backup and self._active_tag == self.name:
            assert self.backuper is not None
            self.backuper.backup(self.name)
            self._trained_since_backup = False

    def copy_to_tag(self, dst_tag: str) -> None:
        """Keep the current weights under ``dst_tag`` too (the reference model, once the warm-up has ended)."""
        self._refuse_in_training("copy_to_tag")
        self.require(FORWARD, tag=self.name)
        assert self.backuper is not None
        if self._rebuilds:
            self.backuper.backup(dst_tag)
        else:
            self._backup_if_trained()
            self.backuper.copy(src_tag=self.name, dst_tag=dst_tag)

    def weights_on_host(self, tag: str) -> Mapping[str, torch.Tensor]:
        """Name -> tensor of the weights of ``tag`` in host memory. The role sleeps before and afterwards, if models do.
        Its own weights are copied where no backup keeps them; a tag that the GPU keeps is there."""
        self._backup_if_trained()
        if self.backuper is not None and (tag != self.name or tag in self.backuper.backup_tags):
            return self.backuper.get(tag)
        copy = TensorBackuper.create(source_getter=lambda: named_tensors(self.chunks))
        with self.awake(kinds=FORWARD):
            copy.backup(self.name)
        return copy.get(self.name)

    # ---- work --------------------------------------------------------------------------------------------------

    def require(self, kinds: Collection[str], *, tag: str | None = None) -> None:
        """Raise RuntimeError unless ``kinds`` are awake (and the active weights are those of ``tag``)."""
        asleep = sorted(kind for kind in self._with_rest(kinds) if self.is_asleep(kind))
        if asleep:
            raise RuntimeError(f"the {self.name}'s {', '.join(asleep)} buffers are asleep: call wake_up() first")
        if self._active_tag is None:
            raise RuntimeError(f"the {self.name}'s parameters hold no weights: call wake_up() first")
        if tag is not None and self._active_tag != tag:
            raise RuntimeError(f"the {self.name} holds the weights of {self._active_tag!r}, not {tag!r}")

    @contextmanager
    def training(self) -> Iterator[None]:
        """One optimizer step's forward and backward passes happen inside, then :meth:`step`. Gradients add up until
        then, so nothing in between may drop them or change the weights: whatever would is a RuntimeError."""
        self._refuse_in_training("training")
        self.require(TRAINING, tag=self.name)
        drop_routing(self.chunks)  # of a step that failed half-way
        self._set_param_hooks(enabled=True)
        self._trains = True
        try:
            for chunk in self.chunks:
                chunk.zero_grad_buffer()
            self.optimizer.zero_grad(set_to_none=True)
            yield
        finally:
            self._trains = False
            self._set_param_hooks(enabled=False)

    def _refuse_in_training(self, method: str) -> None:
        if self._trains:
            raise RuntimeError(
                f"{method}() of the {self.name} inside training(), where gradients of several micro-batches add up: "
                "call it before training(), or after the step"
            )

    def step(self) -> tuple[bool, float]:
        """Optimizer step on the gradients in the buffers -> (updated, gradient norm before clipping)."""
        self.require(TRAINING, tag=self.name)
        self._regions.will_change()
        try:
            updated, grad_norm = optimizers.step(self.optimizer)
        except torch.OutOfMemoryError as error:  # some of the parameters have moved: no pass can be repeated
            raise RuntimeError(f"the {self.name}'s optimizer step ran out of GPU memory: {error}") from error
        self._trained_since_backup = True
        return updated, grad_norm

    def restart_optimizer(self) -> None:
        """Forget Adam's moments and step count: the next step is the first one of an optimizer that was just built."""
        self.require(TRAINING, tag=self.name)
        self._regions.will_change()
        self._regions.wait_for_optimizer_state()
        self._state.zero_moments()
        optimizers.set_step_count(self.optimizer, 0)

    def _set_param_hooks(self, *, enabled: bool) -> None:
        """Hooks that gather parameters during the forward pass live inside :meth:`training` only; leaving it completes
        the gather, so that backups, forward-only passes and sleep see whole parameters."""
        if not self._gathers_in_forward:
            return
        for chunk in self.chunks:
            if enabled:
                chunk.enable_forward_pre_hook()
            else:
                chunk.disable_forward_pre_hook(param_sync=True)

    def load_weights(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Copy ``weights`` (names and parts of :func:`named_tensors`) into the model and refresh the fp32 main params,
        without which the next optimizer step would undo the load. A lazy mapping is read one tensor at a time; whole
        tensors go through :meth:`load_whole_weights`.

        Raises:
            ValueError: a name that the model lacks, or another shape than its tensor has.
        """
        self._refuse_in_training("load_weights")
        self.require(TRAINING, tag=self.name)
        self._regions.will_change()
        own = dict(named_tensors(self.chunks))
        unknown = sorted(set(weights) - set(own))
        if unknown:
            raise ValueError(f"the {self.name} has no tensors called {', '.join(unknown)}")
        with torch.no_grad():
            for name, tensor in weights.items():
                if tensor.shape != own[name].shape:
                    raise ValueError(
                        f"{name} has the shape {tuple(tensor.shape)}, the {self.name}'s is {tuple(own[name].shape)}"
                    )
                own[name].copy_(tensor)
        if self.spec.is_trained:
            self.optimizer.reload_model_params()
        self._trained_since_backup = True
        self._backup_if_trained()

    def load_whole_weights(self, weights: Mapping[str, torch.Tensor]) -> None:
        """As :meth:`load_weights`, from tensors of the whole model, of which this rank takes its parts."""
        self.load_weights(OwnParts(weights, dict(named_tensors(self.chunks))))

    def whole_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Name and tensor of all that the whole model reads in a forward pass, one at a time, on every rank. Collective
        over the ranks that hold the model together: all of them must read to the end."""
        self.require(FORWARD)
        return whole_tensors(self.chunks)

    def parameter_count(self) -> int:
        """Parameters on this rank."""
        return sum(param.numel() for chunk in self.chunks for param in chunk.parameters())

    def weights_not_finite(self) -> list[str]:
        """Names of this rank's model tensors that hold NaN or infinity."""
        self.require(FORWARD)
        return [name for name, tensor in named_tensors(self.chunks) if not tensor.isfinite().all()]

    def weights_sha256(self) -> str:
        """SHA-256 (hex) over the hashes of every model tensor and of the optimizer state of this rank, which are
        computed where those lie (:mod:`trainer.roles.digest`)."""
        self.require(TRAINING, tag=self.name)
        self._regions.wait_for_optimizer_state()
        weights = ((name, [tensor]) for name, tensor in named_tensors(self.chunks))
        state = [("optimizer", self._state.pieces)] if self.spec.is_trained else []
        return digest([*weights, *state])


def _shares_of(weights: Mapping[str, torch.Tensor]) -> list[Share]:
    return [Share(name, 0, {"weights": tensor.detach().view(-1)}) for name, tensor in weights.items()]
