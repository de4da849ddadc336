"""``python -m patches``: one line per patch, whether it holds with what is installed. Changes nothing, needs no GPU.

OK: it applies and holds on a probe. CHANGED: what differs upstream; the exit code is 1. UPSTREAMED: delete the patch.
"""

from __future__ import annotations

import gc
import sys
from importlib import metadata

import patches
from patches.registry import Patch


def state_of(patch: Patch) -> tuple[str, str]:
    """(state, detail) of one patch; a probe that raises, since a name or module is gone, says CHANGED too."""
    try:
        return patch.probe()
    except Exception as error:
        return "CHANGED", f"{type(error).__name__}: {error}"


def main() -> int:
    versions = [f"{name} {metadata.version(name)}" for name in ("torch", "megatron-core", "torch_memory_saver")]
    print(f"python {sys.version.split()[0]}, {', '.join(versions)}")
    states = set()
    for name in patches.NAMES:
        state, detail = state_of(patches.get(name))
        states.add(state)
        print(f"{name:18} {state:10} {' '.join(detail.split())}", flush=True)
    return 1 if "CHANGED" in states else 0


if __name__ == "__main__":
    gc.disable()  # imports make no garbage
    sys.exit(main())
