"""Changes of other projects that Torpor needs, as a registry: explicit, idempotent, reversible, guarded.

Nothing is patched at import. ``patches.apply(*names)`` applies, ``patches.revert()`` puts everything back, and
``python -m patches`` says for each patch whether it holds with the installed versions.
"""

from __future__ import annotations

from importlib import import_module

from patches.registry import Patch

NAMES = ("ddp_buffer_backup", "fused_adamw", "one_rank_groups", "reloadable_groups", "cpu_platform", "cpu_saver")


def get(name: str) -> Patch:
    """The patch called ``name``. Raises ValueError for an unknown name."""
    if name not in NAMES:
        raise ValueError(f"no patch is called {name!r}; there are {', '.join(NAMES)}")
    return import_module(f"patches.{name}").PATCH


def apply(*names: str) -> list[str]:
    """Apply the named patches in order (those applied already are left alone).

    Returns:
        One line per patch, "name: what it changes", for the log.
    """
    lines = []
    for name in names:
        patch = get(name)
        patch.apply()
        lines.append(f"{name}: {patch.why} ({patch.target})")
    return lines


def applied() -> tuple[str, ...]:
    """Names of the patches in force now."""
    return tuple(name for name in NAMES if get(name).applied)


def revert(*names: str) -> None:
    """Put the originals of the named patches back (of all, without names), last applied first."""
    for name in reversed(names or NAMES):
        get(name).revert()
