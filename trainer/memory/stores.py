"""Which store an optimizer state has while it sleeps, as plan and config say."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from trainer.config.schema import Config
from trainer.memory.arena import HostArenas
from trainer.memory.arena_store import ArenaStore
from trainer.memory.disk_store import DiskStore
from trainer.memory.keeper import Store
from trainer.memory.packed_store import AnsCoder, PackedStore, ZlibCoder
from trainer.memory.rounding import RoundedMoments, stored_like
from trainer.plan import PlanRow
from trainer.plan.keepers import OWN_KEEPERS


def make_store(
    row: PlanRow,
    pieces: Sequence[torch.Tensor],
    *,
    main_pieces: int,
    config: Config,
    arenas: HostArenas,
    rounding_seed: Callable[[int], int],
) -> Store | None:
    """The store of the keeper in ``row``; None if the saver keeps the state or nothing sleeps.

    Args:
        main_pieces: so many pieces, the first ones, hold main params.
        rounding_seed: number of a piece -> seed of its rounding, if it is rounded.
    """
    if row.keeper not in OWN_KEEPERS:
        return None
    is_rounded = config.memory.optim_format == "bf16"
    stored = stored_like(pieces, main_pieces=main_pieces) if is_rounded else pieces
    store = _store(row, stored, config=config, arenas=arenas)
    return RoundedMoments(store, main_pieces=main_pieces, seed_of=rounding_seed) if is_rounded else store


def _store(row: PlanRow, pieces: Sequence[torch.Tensor], *, config: Config, arenas: HostArenas) -> Store:
    match row.keeper:
        case "disk":
            assert config.memory.disk.path is not None
            return DiskStore(pieces, Path(config.memory.disk.path), arena=arenas.take(row.tag, DiskStore.buffer_bytes))
        case "packed":
            coder = AnsCoder if config.platform.name == "cuda" else ZlibCoder
            arena = arenas.take(row.tag, PackedStore.uncoded_bytes(pieces))
            return PackedStore(pieces, arena, coder=coder, pinned=arenas.pinned)
        case _:
            return ArenaStore(pieces, arenas.take(row.tag, ArenaStore.bytes_needed(pieces)))
