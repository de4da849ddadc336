"""``python -m patches``: one line per patch, whether it holds with what is installed. Changes nothing, needs no GPU.

OK: it applies and holds on a probe. CHANGED: what differs upstream; the exit code is 1. UPSTREAMED: delete the patch.
"""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor
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
    with ThreadPoolExecutor() as pool:  # the probes wait for processes of their own
        states = list(pool.map(state_of, map(patches.get, patches.NAMES)))
    for name, (state, detail) in zip(patches.NAMES, states, strict=True):
        print(f"{name:18} {state:10} {' '.join(detail.split())}")
    return 1 if any(state == "CHANGED" for state, _ in states) else 0


if __name__ == "__main__":
    sys.exit(main())
