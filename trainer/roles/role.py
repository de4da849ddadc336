"""A role: model, optimizer and weights backuper, and their sleep and wake-up.

What each buffer comes back from is the plan's; this module carries it out. A forward pass between a region's wake-up
and the restore of its bytes is impossible through the public methods: :meth:`Role.wake_up` does both or raises.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import TypeVar

import torch
from torch import Tensor

from trainer.config.roles import role_spec
from trainer.config.schema import Config
from trainer.megatron.build import drop_caches
from trainer.megatron.sharding import OwnParts, Share, whole_tensors
from trainer.memory.arena import HostArenas
from trainer.memory.regions import MemoryObserver, RoleRegions, with_rest
from trainer.memory.saver import Saver
from trainer.plan import KINDS, Plan
from trainer.roles.model import RoleModel
from trainer.roles.shares import HostCopies, awake_shares
from trainer.roles.weights import RoleWeights

TRAINING = frozenset(KINDS)
FORWARD = frozenset({"param"})
Result = TypeVar("Result")


class Role:
    """Build it awake, then :meth:`wake_up` and :meth:`sleep`. ``kinds`` are buffer kinds of :mod:`trainer.plan`;
    ``param`` brings ``rest`` along, since no forward pass works without both.

    Attributes:
        regions: the memory that sleeps.
    """

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
        ddp = self.config.ddp
        overlaps = ddp is not None and (ddp.overlap_grad_reduce or ddp.overlap_param_gather)
        self._reduces_after_passes = self._computes_alone and not overlaps
        self._sleeps, self._trains = plan.sleeps, False
        self.regions = regions = RoleRegions(name, plan=plan, saver=saver, observer=observer)
        self.model = RoleModel(
            name, config, plan=plan, regions=regions, arenas=arenas, vocab_size=vocab_size, seed=seed
        )
        self._weights = RoleWeights(name, config, plan=plan, model=self.model, regions=regions, arenas=arenas)
        saver.turns.add(self)

    # ---- sleep and wake-up -------------------------------------------------------------------------------------

    @property
    def active_tag(self) -> str | None:
        """The weights tag that lies in the parameters; None while they sleep."""
        return self._weights.active_tag

    def is_asleep(self, kind: str) -> bool:
        return self.regions.is_asleep(kind)

    def prepare_sleep(self) -> None:
        """Page-lock now what the first sleep would page-lock. A role that sleeps as soon as it is built has no use
        for it."""
        self.regions.prepare_sleep()

    def sleep(self, *, kinds: Collection[str] = TRAINING) -> None:
        """Release the buffers of ``kinds`` (those asleep already stay so). Weights trained since the last backup are
        backed up first.

        Raises:
            ValueError: an unknown kind.
            RuntimeError: inside :meth:`training`; so do all methods that make the role sleep or change its weights.
        """
        self._refuse_in_training("sleep")
        kinds = with_rest(kinds)
        goes_to_sleep = "param" in kinds and self._sleeps and not self.is_asleep("rest")
        if goes_to_sleep:
            self._weights.backup()
            drop_caches()
            self.model.drop_activations()
            self._weights.active_tag = None  # before the first region goes: a sleep may fail half-way
        if "grad" in kinds:
            self.model.drop_grads()
        self.regions.sleep(kinds, backuper_bytes=self._weights.restored_bytes())
        if goes_to_sleep:
            self._weights.record_tags()

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
        self._weights.check(tag)
        kinds = with_rest(kinds)
        if "param" in kinds and self._weights.needs_main_params(tag):
            kinds = kinds | {"optim"}
        self._saver.turns.map(
            self.name, kinds, lambda: self.regions.wake_up(kinds, backuper_bytes=self._weights.restored_bytes())
        )
        if "param" in kinds and self._weights.active_tag != tag:
            self._weights.switch_to(tag)

    @contextmanager
    def awake(self, *, kinds: Collection[str] = TRAINING, tag: str | None = None) -> Iterator[None]:
        """Awake inside, asleep after, also when the body raises, unless a schedule lets it stay awake for now."""
        self._refuse_in_training("awake")
        try:
            self.wake_up(kinds=kinds, tag=tag)
            yield
        finally:
            self._saver.turns.done(self)

    def place_tags(self, tags: Collection[str]) -> None:
        """Keep the copies of ``tags`` in GPU memory, and those of all others in host memory."""
        self._weights.place(tags)

    def repeated(self, work: Callable[[], Result], *, trains: bool = False) -> Result:
        """What ``work``, passes of this role, returns; see :class:`trainer.memory.turns.Turns`."""
        is_alone = self._trains_alone if trains else self._computes_alone
        return self._saver.turns.repeated(work, is_collective=not is_alone, meets=trains and self._reduces_after_passes)

    def meet(self) -> None:
        """Inside such work that trains: the passes are done, and gradients are about to be reduced."""
        self._saver.turns.meet()

    @contextmanager
    def readable(self) -> Iterator[list[Share]]:
        """This rank's shares of all that a checkpoint holds, as the last step left it, valid inside; asleep after.

        Their kinds are ``weights``, the backuper's further tags, and those that
        :func:`trainer.megatron.optimizer.shares` names.
        What host memory holds of a sleeping role is read there, and only the rest wakes up.
        """
        self._refuse_in_training("readable")
        held = HostCopies.of(self.name, self._weights, self.regions)
        try:
            self.wake_up(kinds=held.absent_kinds)
            yield held.shares(self.name, self.model, self._weights, self.regions)
        finally:
            self._saver.turns.done(self)

    @contextmanager
    def overwriting(self, *, tags: Collection[str]) -> Iterator[list[Share]]:
        """The same of an awake role, to be filled inside, with ``tags`` as its further tags."""
        self._refuse_in_training("overwriting")
        self.require(TRAINING, tag=self.name)
        self.regions.will_change()
        self._weights.add_tags(tags)
        yield awake_shares(self.model, self._weights)
        self._weights.changed()
        self._weights.backup()

    @property
    def further_tags(self) -> list[str]:
        """Of the weights backuper: those beside the role's own."""
        return self._weights.further_tags

    # ---- weights -----------------------------------------------------------------------------------------------

    def switch_to(self, tag: str) -> None:
        """Put the weights of ``tag`` into the awake parameters, e.g. "ref" and back to "actor"."""
        self._refuse_in_training("switch_to")
        self.require(FORWARD)
        self._weights.check(tag)
        if self._weights.needs_main_params(tag):
            self.wake_up(kinds={"optim"})
        self._weights.switch_to(tag)

    def backup(self) -> None:
        """After a training phase; nothing to do for a role whose parameters are rebuilt or that has no backuper."""
        self._refuse_in_training("backup")
        self.require(FORWARD)
        if not self._saver.turns.keeps_awake:  # else it waits for the switch or the sleep that needs it
            self._weights.backup()
            self.regions.start_saving()

    def copy_to_tag(self, dst_tag: str) -> None:
        """Keep the current weights under ``dst_tag`` too (the reference model, once the warm-up has ended)."""
        self._refuse_in_training("copy_to_tag")
        self.require(FORWARD, tag=self.name)
        self._weights.copy_to(dst_tag)

    def weights_on_host(self, tag: str) -> Mapping[str, Tensor]:
        """Name -> tensor of the weights of ``tag`` in host memory. The role sleeps before and afterwards, if models do.
        Its own weights are copied where no backup keeps them; a tag that the GPU keeps is there."""
        kept = self._weights.kept(tag)
        if kept is not None:
            return kept
        with self.awake(kinds=FORWARD):
            return self._weights.copied()

    def whole_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Name and tensor of all that the whole model reads in a forward pass, one at a time, on every rank. Collective
        over the ranks that hold the model together: all of them must read to the end."""
        self.require(FORWARD)
        return whole_tensors(self.model.chunks)

    def load_weights(self, weights: Mapping[str, Tensor]) -> None:
        """Copy ``weights`` (names and shapes of ``model.tensors()``) into the model and refresh the fp32 main params,
        without which the next optimizer step would undo the load. A lazy mapping is read one tensor at a time.

        Raises:
            ValueError: a name that the model lacks, or another shape than its tensor has.
        """
        self._refuse_in_training("load_weights")
        self.require(TRAINING, tag=self.name)
        self.regions.will_change()
        self.model.load(weights)
        self._weights.changed()
        self._weights.backup()

    def load_whole_weights(self, weights: Mapping[str, Tensor]) -> None:
        """As :meth:`load_weights`, from tensors of the whole model, of which this rank takes its parts."""
        self.load_weights(OwnParts(weights, self.model.tensors()))

    def weights_sha256(self) -> str:
        """SHA-256 (hex) over the hashes of every model tensor and of the optimizer state of this rank, which are
        computed where those lie (:mod:`trainer.roles.digest`)."""
        self.require(TRAINING, tag=self.name)
        self.regions.wait_for_optimizer_state()
        return self.model.digest()

    # ---- work --------------------------------------------------------------------------------------------------

    def require(self, kinds: Collection[str], *, tag: str | None = None) -> None:
        """Raise RuntimeError unless ``kinds`` are awake (and the active weights are those of ``tag``)."""
        asleep = sorted(kind for kind in with_rest(kinds) if self.is_asleep(kind))
        if asleep:
            raise RuntimeError(f"the {self.name}'s {', '.join(asleep)} buffers are asleep: call wake_up() first")
        if self.active_tag is None:
            raise RuntimeError(f"the {self.name}'s parameters hold no weights: call wake_up() first")
        if tag is not None and self.active_tag != tag:
            raise RuntimeError(f"the {self.name} holds the weights of {self.active_tag!r}, not {tag!r}")

    @contextmanager
    def training(self) -> Iterator[None]:
        """One optimizer step's forward and backward passes happen inside, then :meth:`step`. Gradients add up until
        then, so nothing in between may drop them or change the weights: whatever would is a RuntimeError."""
        self._refuse_in_training("training")
        self.require(TRAINING, tag=self.name)
        self.model.drop_activations()  # of a step that failed half-way
        self.model.set_param_hooks(enabled=True)
        self._trains = True
        try:
            self.model.zero_grads()
            yield
        finally:
            self._trains = False
            self.model.set_param_hooks(enabled=False)

    def _refuse_in_training(self, method: str) -> None:
        if self._trains:
            raise RuntimeError(
                f"{method}() of the {self.name} inside training(), where gradients of several micro-batches add up: "
                "call it before training(), or after the step"
            )

    def step(self) -> tuple[bool, float]:
        """Optimizer step on the gradients in the buffers -> (updated, gradient norm before clipping)."""
        self.require(TRAINING, tag=self.name)
        self.regions.will_change()
        try:
            updated, grad_norm = self.model.step()
        except torch.OutOfMemoryError as error:  # some of the parameters have moved: no pass can be repeated
            raise RuntimeError(f"the {self.name}'s optimizer step ran out of GPU memory: {error}") from error
        self._weights.changed()
        return updated, grad_norm

    def restart_optimizer(self) -> None:
        """Forget Adam's moments and step count: the next step is the first one of an optimizer that was just built."""
        self.require(TRAINING, tag=self.name)
        self.regions.will_change()
        self.regions.wait_for_optimizer_state()
        self.model.restart_optimizer()
