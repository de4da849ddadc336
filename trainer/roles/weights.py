"""Which weights a role's parameters hold, and where those that they do not hold are kept."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from torch import Tensor

from trainer.config.roles import role_spec
from trainer.config.schema import Config
from trainer.megatron.param_shards import ParamShards
from trainer.megatron.sharding import Share
from trainer.memory.arena import HostArenas
from trainer.memory.regions import RoleRegions
from trainer.plan import Plan, weights_kind
from trainer.roles.backuper import TensorBackuper
from trainer.roles.model import RoleModel


class RoleWeights:
    """The tags of a role: its own weights and, with a backuper, others beside them.

    Attributes:
        active_tag: the tag that lies in the parameters; None while they sleep.
        backuper: None of a role that is always restored by the saver.
    """

    def __init__(
        self, name: str, config: Config, *, plan: Plan, model: RoleModel, regions: RoleRegions, arenas: HostArenas
    ) -> None:
        spec = role_spec(config, name)
        self._name, self._model, self._regions = name, model, regions
        self._kind = weights_kind(plan, name)  # the buffer kind in which most parameters lie
        self._is_restored = plan.row(name, self._kind).keeper == "backuper"
        self._is_rebuilt = plan.row(name, "param").keeper == "main_params"
        self.active_tag: str | None = name
        self._changed = True  # since the last backup
        self.backuper: TensorBackuper | None = None
        if spec.has_backuper:
            is_shared = config.memory.tags == "sharded" and spec.is_trained
            self.backuper = TensorBackuper.create(
                source_getter=lambda: model.tensors().items(),
                single_tag=None,
                arenas=arenas,
                layout=ParamShards(model.chunks) if is_shared else None,
            )
            regions.count(self.backuper.copies)
            self.backup()

    def changed(self) -> None:
        """The role's own weights, which lie in the parameters, are new."""
        self._changed = True

    def backup(self) -> None:
        """Back up the role's own weights, if they are new and nothing else restores them."""
        keeps_own_tag = self.backuper is not None and not self._is_rebuilt
        if keeps_own_tag and self._changed and self.active_tag == self._name:
            assert self.backuper is not None
            self.backuper.backup(self._name)
            self._changed = False

    def needs_main_params(self, tag: str) -> bool:
        """Whether ``tag`` comes back from optimizer state that the saver keeps, which must be awake then."""
        return self._is_rebuilt and tag == self._name and self._regions.keeper_of_sleeping_state is None

    def switch_to(self, tag: str) -> None:
        """Restore ``tag``, even if it is the active one: after a wake-up the parameters may hold anything."""
        self.backup()
        if tag == self._name and self._is_rebuilt:
            with self._regions.restoring(self._kind):
                keeper = self._regions.keeper_of_sleeping_state
                self._regions.wait_for_optimizer_state(main_params_only=True)
                self._model.rebuild_params(None if keeper is None else keeper.read_main_params())
        elif self.backuper is not None:
            with self._regions.restoring(self._kind):
                self.backuper.restore(tag)
        self.active_tag = tag

    def check(self, tag: str) -> None:
        """Raise ValueError unless the parameters can hold ``tag``."""
        if tag == self._name:
            return
        if self.backuper is None:
            raise ValueError(f"the {self._name} has no weights backuper, so no tag {tag!r}")
        self.backuper.bytes_of(tag)

    def copy_to(self, tag: str) -> None:
        """Keep the role's own weights, which lie in the parameters, under ``tag`` too."""
        assert self.backuper is not None
        if self._is_rebuilt:
            self.backuper.backup(tag)
        else:
            self.backup()
            self.backuper.copy(src_tag=self._name, dst_tag=tag)

    def kept(self, tag: str) -> Mapping[str, Tensor] | None:
        """Name -> tensor of the copy of ``tag``, up to date; None of own weights that no backup keeps."""
        self.backup()
        if self.backuper is None or (tag == self._name and tag not in self.backuper.backup_tags):
            return None
        return self.backuper.get(tag)

    def copied(self) -> Mapping[str, Tensor]:
        """A copy in host memory of what lies in the parameters."""
        copy = TensorBackuper.create(source_getter=lambda: self._model.tensors().items())
        copy.backup(self._name)
        return copy.get(self._name)

    def place(self, tags: Collection[str]) -> None:
        if self.backuper is not None:
            self.backuper.place(tags)

    # ---- for checkpoints -----------------------------------------------------------------------------------------

    @property
    def further_tags(self) -> list[str]:
        """Those beside the role's own."""
        return [tag for tag in self.backuper.backup_tags if tag != self._name] if self.backuper else []

    def add_tags(self, tags: Collection[str]) -> None:
        """Make room for ``tags``, with any content."""
        for tag in tags:
            assert self.backuper is not None, f"the {self._name} has no weights backuper, so no tags {tags}"
            self.backuper.backup(tag)

    def shares_of_further_tags(self) -> list[Share]:
        return [share for tag in self.further_tags for share in self.shares_of(tag, kind=tag)]

    def shares_of(self, tag: str, *, kind: str) -> list[Share]:
        assert self.backuper is not None
        return [Share(name, start, {kind: part}) for name, start, part in self.backuper.parts(tag)]

    # ---- for the ledger ------------------------------------------------------------------------------------------

    def restored_bytes(self) -> dict[str, int]:
        """Buffer kind -> host bytes that the backuper keeps in its stead."""
        if self.backuper is None or not self._is_restored:
            return {}
        return {self._kind: self.backuper.bytes_of(self._name)}

    def record_tags(self) -> None:
        """Record the host bytes of backups beside the one that restores the role's own parameters."""
        for tag in self.backuper.backup_tags if self.backuper else ():
            if not (tag == self._name and self.restored_bytes()):
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
