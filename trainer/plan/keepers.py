"""Who keeps the optimizer state of a sleeping role (``memory.<role>.optim_keeper``), and in how many bytes. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from trainer.common.multiples import ALIGNMENT_BYTES, round_up

OWN_KEEPERS = ("arena", "disk", "packed")  # ours; the other keeper is the saver
DISK_BUFFER_BYTES = 16 * 2**20
DISK_BUFFERS = 4


@dataclass(frozen=True)
class KeptBytes:
    """Of one optimizer state. ``arena``: host memory of known size, made before the model; ``host``: all host memory,
    of a packed state the bound."""

    arena: int = 0
    host: int = 0
    disk: int = 0


def kept_bytes(keeper: str, state: int, *, main_params: int, optim_format: str) -> KeptBytes:
    """What one of :data:`OWN_KEEPERS` takes for ``state`` bytes, of which ``main_params`` are those of main params."""
    stored = main_params + (state - main_params) // 2 if optim_format == "bf16" else state
    match keeper:
        case "arena":
            size = round_up(stored, ALIGNMENT_BYTES)
            return KeptBytes(arena=size, host=size)
        case "packed":  # three bytes of four as they are
            return KeptBytes(arena=3 * state // 4, host=state)
        case "disk":
            size = DISK_BUFFERS * DISK_BUFFER_BYTES
            return KeptBytes(arena=size, host=size, disk=stored)
    return KeptBytes()
