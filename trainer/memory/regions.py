"""One role's regions: which sleep and wake up, in which order, by which keeper, and the record of it.

A buffer kind is one region; the optimizer state is one for each of its pieces.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch

from trainer.config.schema import Config
from trainer.memory.arena import Copies, HostArenas, RegionBytes
from trainer.memory.hand_over import HandOver
from trainer.memory.keeper import StateKeeper
from trainer.memory.saver import Saver
from trainer.memory.stores import make_store
from trainer.memory.turns import Turns
from trainer.plan import KINDS, NO_BUFFER, Plan, PlanRow

MemoryObserver = Callable[[dict[str, Any]], None]


def with_rest(kinds: Collection[str]) -> frozenset[str]:
    """``kinds``, with both ``param`` and ``rest`` if one is among them. Raises ValueError: an unknown kind."""
    unknown = sorted(set(kinds) - set(KINDS))
    if unknown:
        raise ValueError(f"unknown buffer kinds {', '.join(unknown)}; kinds are {', '.join(KINDS)}")
    return frozenset(kinds) | ({"rest", "param"} if {"param", "rest"} & set(kinds) else set())


class RoleRegions:
    """The regions of one role, under the saver; the optimizer state may have a keeper of its own.

    Attributes:
        hand_over: in which the optimizer state leaves or comes right now, if it does.
    """

    def __init__(self, role: str, *, plan: Plan, saver: Saver, observer: MemoryObserver) -> None:
        self._rows = {row.kind: row for row in plan.of_role(role) if row.keeper != NO_BUFFER}
        self._tags = {kind: [row.tag] for kind, row in self._rows.items() if kind != "optim"} | {"optim": []}
        self._saver, self._observe, self.role = saver, observer, role
        self.hand_over: HandOver | None = None
        self._piece_bytes: dict[int, int] = {}
        self._keeper: StateKeeper | None = None
        self._savers_copies = Copies()
        self._counted, self._reported = [self._savers_copies], Copies()

    def count(self, copies: Copies) -> None:
        """Let what an owner copies be part of the records."""
        self._counted.append(copies)

    def region(self, kind: str) -> AbstractContextManager[None]:
        """Allocate the buffers of ``kind`` inside."""
        row = self._rows[kind]
        return self._saver.region(row.tag, backup=row.saver_backup)

    def optimizer_region(self, number: int) -> AbstractContextManager[None]:
        """Allocate a piece of the optimizer state inside; further ones have a number in their tag."""
        row = self._rows["optim"]
        tag = f"{row.tag}/{number}" if number else row.tag
        self._tags["optim"].append(tag)
        return self._saver.region(tag, backup=row.saver_backup)

    def of_ddp_buffer(self, kind: str, backup: bool) -> AbstractContextManager[None]:
        """Where Megatron's DDP allocates its buffers of ``kind``: ``region_for`` of :mod:`patches.ddp_buffer_backup`,
        which gets the plan's flags and says whether there is a backup."""
        return self._saver.region(self._rows[kind].tag, backup=backup)

    def keep_optimizer_state(
        self,
        pieces: Sequence[torch.Tensor],
        *,
        main_pieces: int,
        config: Config,
        arenas: HostArenas,
        rounding_seed: Callable[[int], int],
    ) -> None:
        """Give the optimizer state the keeper that the plan names, if that is not the saver; arguments as for
        :func:`~trainer.memory.stores.make_store`."""
        store = make_store(
            self._rows["optim"],
            pieces,
            main_pieces=main_pieces,
            config=config,
            arenas=arenas,
            rounding_seed=rounding_seed,
        )
        if store is not None:
            self._keeper = StateKeeper(pieces, main_pieces=main_pieces, store=store)
            self.count(self._keeper.copies)

    def prepare_sleep(self) -> None:
        """Let the saver page-lock the host buffers that it keeps now, while models are built, and not in a sleep."""
        if self._saver.keeps_host_buffers:
            for kind, row in self._rows.items():
                for tag in self._tags[kind] if row.saver_backup else ():
                    self._saver.sleep(tag)
                    self._saver.wake_up(tag)

    @property
    def keeper_of_sleeping_state(self) -> StateKeeper | None:
        """Who has the sleeping optimizer state; None if it is awake or the saver keeps it."""
        if not self.is_asleep("optim"):
            return None
        self._settle()
        return self._keeper

    def is_asleep(self, kind: str) -> bool:
        """Whether ``kind`` sleeps, all or, after a sleep or wake-up that failed, some of it."""
        if kind == "optim" and self.hand_over is not None:
            return self.hand_over.goes(self)
        return kind in self._rows and any(map(self._saver.is_asleep, self._tags[kind]))

    def start_saving(self) -> None:
        """Begin what of a coming sleep can overlap with other work: nothing changes the optimizer state until then."""
        if self._keeper is not None and not self.is_asleep("optim"):
            self._settle()
            self._keeper.start_save()

    def will_change(self) -> None:
        """Whoever changes the awake optimizer state calls this first; it waits for copies like
        :meth:`wait_for_optimizer_state`."""
        if self._keeper is not None:
            self._settle()
            self._keeper.invalidate()

    def wait_for_optimizer_state(self, *, main_params_only: bool = False) -> None:
        """Whoever reads the awake optimizer state calls this first: it may still be on its way back."""
        if self._keeper is not None:
            if not main_params_only:
                self._settle()
            elif self.hand_over is not None:
                self.hand_over.wait_for_pieces(self._keeper.main_pieces)
            self._keeper.wait(main_params_only=main_params_only)

    def sleep(self, kinds: Collection[str], *, backuper_bytes: Mapping[str, int]) -> None:
        """Release those of ``kinds`` that are awake. ``backuper_bytes``: kind -> what the backuper keeps for it."""
        if "optim" in kinds:
            self._settle()
        awake = [row for kind, row in self._rows.items() if kind in kinds and self._tags_that(kind, sleep=False)]
        if awake and self.hand_over is None:
            self._saver.wait_for_device()
        elif awake:  # the hand-over found nothing queued when it began, and its own copies need not end for this
            torch.cuda.current_stream().synchronize()
        if "optim" in kinds:
            self.start_saving()  # if nobody has: the copy runs while the other regions, which it does not read, go
        for row in sorted(awake, key=lambda row: row.kind == "optim"):
            self._timed(row, "asleep", self._release, backuper_bytes)

    def wake_up(self, kinds: Collection[str], *, backuper_bytes: Mapping[str, int]) -> None:
        """Map those of ``kinds`` that are asleep. Raises MemoryError, with all of them still asleep, if one does not
        fit."""
        if "optim" in kinds and self.is_asleep("optim"):
            self._settle()
        asleep = [row for kind, row in self._rows.items() if kind in kinds and self.is_asleep(kind)]
        self._saver.check_room([tag for row in asleep for tag in self._tags_that(row.kind, sleep=True)])
        for row in sorted(asleep, key=lambda row: row.kind != "optim"):  # the others are mapped while its copy runs
            self._timed(row, "awake", self._map, backuper_bytes)

    @contextmanager
    def restoring(self, kind: str) -> Iterator[None]:
        """Bring weights back into the mapped buffers of ``kind`` inside."""
        start = time.perf_counter()
        yield
        row = self._rows[kind]
        if self._saver.sleeps:
            seconds = time.perf_counter() - start
            sizes = {"released_bytes": 0, "backup_bytes": 0}
            self.record(kind, state="restored", flag=row.flag, keeper=row.keeper, seconds=seconds, **sizes)

    # ---- pieces of an optimizer state that has a keeper of its own ---------------------------------------------------

    @property
    def has_keeper(self) -> bool:
        return self._keeper is not None

    def state_pieces(self, *, asleep: bool) -> list[int]:
        """The numbers of those that sleep, or are awake."""
        return [number for number, tag in enumerate(self._tags["optim"]) if self._saver.is_asleep(tag) == asleep]

    def piece_bytes(self, piece: int) -> int:
        """Device memory of one while it is awake."""
        if piece not in self._piece_bytes:  # asking takes a while on a GPU
            self._piece_bytes[piece] = self._saver.resident_bytes(self._tags["optim"][piece])
        return self._piece_bytes[piece]

    def start_saving_piece(self, piece: int) -> None:
        """Begin to copy one to the keeper, unless that has a copy."""
        assert self._keeper is not None
        self._keeper.start_save(piece)

    def release_piece(self, piece: int) -> RegionBytes:
        """Let one go, once the keeper has it. Nothing may still work with it."""
        assert self._keeper is not None
        self._keeper.finish_save(piece)
        return self._saver.sleep(self._tags["optim"][piece], wait=False)

    def map_piece(self, piece: int) -> RegionBytes:
        """Map one and begin to copy it back. Raises MemoryError if it does not fit."""
        assert self._keeper is not None
        sizes = self._saver.wake_up(self._tags["optim"][piece])
        self._keeper.start_restore(piece)
        return sizes

    def wait_for_piece(self, piece: int) -> None:
        """Block until one that was mapped is back."""
        assert self._keeper is not None
        self._keeper.wait_for(piece)

    def drop_state(self) -> None:
        """Release the awake pieces of a state that is kept and has not changed, whether they are back or not."""
        assert self._keeper is not None
        self._keeper.forget_reads()
        for piece in self.state_pieces(asleep=False):
            self._saver.sleep(self._tags["optim"][piece], wait=False)

    @property
    def turns(self) -> Turns:
        """Who is awake when."""
        return self._saver.turns

    def wait_for_device(self) -> None:
        """Block until all work queued on the device, which may use the regions, is done."""
        self._saver.wait_for_device()

    def _settle(self) -> None:
        if self.hand_over is not None:
            self.hand_over.settle()

    # ---- all of a kind -----------------------------------------------------------------------------------------------

    def _tags_that(self, kind: str, *, sleep: bool) -> list[str]:
        return [tag for tag in self._tags[kind] if self._saver.is_asleep(tag) == sleep]

    def _release(self, row: PlanRow) -> RegionBytes:
        sizes = RegionBytes(0, 0)
        for number, tag in enumerate(self._tags[row.kind]):
            if self._saver.is_asleep(tag):
                continue
            of_keeper = row.kind == "optim" and self._keeper is not None
            sizes += self.release_piece(number) if of_keeper else self._saver.sleep(tag, wait=False)
        self._savers_copies.to_host += sizes.backup_bytes
        return sizes

    def _map(self, row: PlanRow) -> RegionBytes:
        sizes = RegionBytes(0, 0)
        for number, tag in enumerate(self._tags[row.kind]):
            if not self._saver.is_asleep(tag):
                continue
            of_keeper = row.kind == "optim" and self._keeper is not None
            sizes += self.map_piece(number) if of_keeper else self._saver.wake_up(tag)
        self._savers_copies.to_device += sizes.backup_bytes
        return sizes

    def _timed(
        self, row: PlanRow, state: str, action: Callable[[PlanRow], RegionBytes], backuper_bytes: Mapping[str, int]
    ) -> None:
        start = time.perf_counter()
        sizes = action(row)
        if self._saver.sleeps:
            seconds = time.perf_counter() - start
            self._record_sizes(row, state, sizes, seconds=seconds, backuper_bytes=backuper_bytes.get(row.kind, 0))

    def record_state(self, state: str, sizes: RegionBytes, *, seconds: float) -> None:
        """The optimizer state has fallen asleep, or has come, in a hand-over."""
        self._record_sizes(self._rows["optim"], state, sizes, seconds=seconds)

    def _record_sizes(
        self, row: PlanRow, state: str, sizes: RegionBytes, *, seconds: float, backuper_bytes: int = 0
    ) -> None:
        backup_bytes = sizes.backup_bytes + backuper_bytes
        if row.kind == "optim" and self._keeper is not None:
            backup_bytes += self._keeper.host_bytes
        self.record(
            row.kind,
            state=state,
            flag=row.flag,
            keeper=row.keeper,
            released_bytes=sizes.released_bytes,
            backup_bytes=backup_bytes,
            seconds=seconds,
        )

    def record(self, kind: str, **fields: Any) -> None:
        """Hand one memory record of this role to the observer, with what was copied since the last one."""
        total = Copies(sum(c.to_host for c in self._counted), sum(c.to_device for c in self._counted))
        copied = {
            "to_host_bytes": total.to_host - self._reported.to_host,
            "to_device_bytes": total.to_device - self._reported.to_device,
        }
        self._reported = total
        self._observe({"role": self.role, "kind": kind, **fields, **copied})
