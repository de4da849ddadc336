"""The weights backuper: named sets of a model's tensors, one exact-size arena per tag, in host memory or, where there
is room to switch without the bus, in the GPU's.

Reinforcement learning needs several versions of one model's weights (actor, reference); one copy of each lies here
and is switched into the model in place. The idea and the vocabulary (tags, ``source_getter``, ``single_tag``) are
slime's TensorBackuper (https://github.com/THUDM/slime). With a layout that divides tensors over ranks, a rank's arenas
hold its parts alone (``memory.tags=sharded``). With arenas that ranks share (``memory.tags=node``) each writes its
share of a tag and reads all of it; then whatever reads a tag or makes one is collective over these ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch

from trainer.memory.arena import Arena, Copies, HostArena, HostArenas

SourceGetter = Callable[[], Iterable[tuple[str, torch.Tensor]]]


class Layout(Protocol):
    """Which part of every tensor this rank backs up; see :class:`trainer.megatron.param_shards.ParamShards`."""

    def own_part(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """A view of this rank's part of ``tensor``."""
        ...

    def start(self, name: str) -> int:
        """The first element of that part in the flattened tensor."""
        ...

    def complete(self) -> None:
        """Fill the source tensors from what every rank has restored into its parts."""
        ...

    def whole(self, name: str, part: torch.Tensor) -> torch.Tensor:
        """The tensor that every rank's ``part`` adds up to."""
        ...


class WholeTensors:
    """The layout in which every rank keeps everything."""

    def own_part(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    def start(self, name: str) -> int:
        return 0

    def complete(self) -> None:
        pass

    def whole(self, name: str, part: torch.Tensor) -> torch.Tensor:
        return part


@dataclass(frozen=True)
class LazyTensors(Mapping[str, torch.Tensor]):
    """Tensors that ``read(name)`` gets when they are asked for."""

    names: tuple[str, ...]
    read: Callable[[str], torch.Tensor]

    def __getitem__(self, name: str) -> torch.Tensor:
        if name not in self.names:
            raise KeyError(name)
        return self.read(name)

    def __contains__(self, name: object) -> bool:
        return name in self.names

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self.names)


class TensorBackuper:
    """Use :meth:`create`. Unknown tags are ValueErrors; a second backup of a tag reuses its memory."""

    def __init__(self, source_getter: SourceGetter, *, arenas: HostArenas, layout: Layout) -> None:
        self._source_getter, self._arenas, self._layout = source_getter, arenas, layout
        self.copies = Copies()
        self._tags: dict[str, tuple[Arena, dict[str, torch.Tensor]]] = {}

    @classmethod
    def create(
        cls,
        *,
        source_getter: SourceGetter,
        single_tag: str | None = None,
        arenas: HostArenas | None = None,
        layout: Layout | None = None,
    ) -> TensorBackuper:
        """A backuper of the tensors that ``source_getter()`` yields as (name, tensor), always in the same order.

        Args:
            single_tag: must be None. A backuper of a single tag would not keep what role switching needs.
            arenas: makes the arena of each tag, ``weights/<tag>``; None: of ordinary memory.
            layout: which part of the tensors this rank keeps; None: all of them.

        Raises:
            ValueError: ``single_tag`` is not None.
        """
        if single_tag is not None:
            raise ValueError(
                f"single_tag={single_tag!r}: the weights backuper keeps every tag, single_tag must be None"
            )
        return cls(source_getter, arenas=arenas or HostArenas(pinned=False), layout=layout or WholeTensors())

    @property
    def backup_tags(self) -> tuple[str, ...]:
        """Tags that hold a backup, oldest first."""
        return tuple(self._tags)

    @property
    def host_bytes(self) -> int:
        """Host memory of all tags, in bytes."""
        return sum(map(self.bytes_of, self._tags))

    def backup(self, tag: str) -> None:
        """Copy the source tensors to the arena of ``tag``."""
        sources = self._sources()
        if tag not in self._tags:
            self._tags[tag] = self._new_tag(tag, sources)
        copies = self._copies(tag)
        _check_same(sources, copies, tag)
        self._write(tag, sources)
        self.copies.to_host += self.bytes_of(tag)

    def restore(self, tag: str) -> None:
        """Copy what is saved under ``tag`` back into the source tensors, in place. Collective if ranks share it."""
        copies, sources = self._copies(tag), self._sources()
        _check_same(sources, copies, tag)
        arena = self._tags[tag][0]
        with arena.reading():
            _copy_all(copies, sources)
        self._layout.complete()
        self.copies.to_device += 0 if arena.is_on_device else arena.size_bytes

    def copy(self, *, src_tag: str, dst_tag: str) -> None:
        """Make ``dst_tag`` (created if need be) hold what ``src_tag`` holds."""
        copies = self._copies(src_tag)
        if dst_tag not in self._tags:
            self._tags[dst_tag] = self._new_tag(dst_tag, copies)
        with self._tags[src_tag][0].reading():
            self._write(dst_tag, copies)

    def get(self, tag: str) -> Mapping[str, torch.Tensor]:
        """Name -> whole tensor of a tag: a view into its arena or, where ranks share it, gathered when it is asked for.
        Then every rank of the data-parallel group must ask for the same names in the same order. Views of an arena
        that ranks share hold until the next step of training, which all of them take together."""
        copies = self._copies(tag)
        self._tags[tag][0].meet()
        return LazyTensors(tuple(copies), lambda name: self._layout.whole(name, copies[name]))

    def parts(self, tag: str) -> Iterator[tuple[str, int, torch.Tensor]]:
        """(name, first element, what this rank keeps of the flattened tensor from there on, or writes of it where
        ranks share the arena) of every tensor of a tag, views into its arena."""
        for name, copy in self._copies(tag).items():
            own = self._tags[tag][0].own_share(copy)
            yield name, self._layout.start(name) + int(own.storage_offset() - copy.storage_offset()), own.view(-1)

    def _copies(self, tag: str) -> dict[str, torch.Tensor]:
        """Name -> what this rank keeps of the tensor under ``tag``."""
        if tag not in self._tags:
            known = ", ".join(self._tags) or "none"
            raise ValueError(f"no weights are backed up under the tag {tag!r}; backed-up tags: {known}")
        return self._tags[tag][1]

    def bytes_of(self, tag: str) -> int:
        """Host memory of one tag on this rank, in bytes: its share where ranks have one copy together."""
        self._copies(tag)
        return self._tags[tag][0].host_bytes

    def place(self, tags: Collection[str]) -> None:
        """Keep ``tags`` in device memory and all others in host memory from now on; a tag that lies elsewhere moves."""
        self._arenas.on_device = frozenset(f"weights/{tag}" for tag in tags)
        for tag, (arena, copies) in list(self._tags.items()):
            if arena.is_on_device != (tag in tags):
                self._tags[tag] = self._new_tag(tag, copies)
                with arena.reading():
                    self._write(tag, copies)

    def _write(self, tag: str, sources: Mapping[str, torch.Tensor]) -> None:
        """Fill what this rank writes of ``tag``."""
        arena, copies = self._tags[tag]
        _copy_all(*({name: arena.own_share(tensor) for name, tensor in each.items()} for each in (sources, copies)))

    def _sources(self) -> dict[str, torch.Tensor]:
        pairs = list(self._source_getter())
        sources = dict(pairs)
        if len(sources) < len(pairs):
            names = [name for name, _ in pairs]
            repeated = ", ".join(name for name in sources if names.count(name) > 1)
            raise ValueError(f"two tensors of the model are called {repeated}")
        return {name: self._layout.own_part(name, tensor) for name, tensor in sources.items()}

    def _new_tag(self, tag: str, like: Mapping[str, torch.Tensor]) -> tuple[Arena, dict[str, torch.Tensor]]:
        arena = self._arenas.take_for_tag(tag, HostArena.bytes_needed(like.values()))
        arena.wait_until_ready()
        arena.meet()  # nobody's pages are zeroed any more
        return arena, {name: arena.empty_like(tensor) for name, tensor in like.items()}


def _check_same(sources: Mapping[str, torch.Tensor], copies: Mapping[str, torch.Tensor], tag: str) -> None:
    then, now = ([(name, x.shape, x.dtype) for name, x in tensors.items()] for tensors in (copies, sources))
    if now != then:
        changed = ", ".join(sorted({name for name, *_ in set(then) ^ set(now)})) or "their order"
        raise ValueError(f"the model's tensors are not those backed up under {tag!r}; changed: {changed}")


@torch.no_grad()
def _copy_all(sources: Mapping[str, torch.Tensor], targets: Mapping[str, torch.Tensor]) -> None:
    """Fill ``targets`` with what ``sources`` hold under their names, and wait for that; not for other streams, on which
    an optimizer state may be on its way."""
    torch._foreach_copy_(list(targets.values()), [sources[name] for name in targets], non_blocking=True)
    if torch.cuda.is_available():
        torch.cuda.current_stream().synchronize()
