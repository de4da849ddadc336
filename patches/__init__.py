"""Changes of other projects that Torpor needs, as a registry: explicit, idempotent, reversible, guarded.

Nothing is patched at import. ``patches.apply(*names)`` applies, ``patches.revert()`` puts everything back, and
``python -m patches`` says for each patch whether it holds with the installed versions.
"""

from __future__ import annotations

from importlib import import_module

from patches.registry import Patch

NAMES = (
    *("eager_fusions", "ddp_buffer_backup", "fused_adamw", "foreach_grad_norms", "one_rank_groups"),
    *("reloadable_groups", "cpu_platform", "cpu_saver", "vllm_memory"),
)


def get(name: str) -> Patch:
    """The patch called ``name``. Raises ValueError for an unknown name."""
    if name not in NAMES:
        raise ValueError(f"no patch is called {name!r}; there are {', '.join(NAMES)}")
    return import_module(f"patches.{name}").PATCH


_in_force: list[str] = []  # in the order of their application


def apply(*names: str) -> list[str]:
    """Apply the named patches, each after those that it names as to come before it (those applied already are left
    alone).

    Returns:
        One line per patch, "name: what it changes", for the log.

    Raises:
        ValueError: an unknown name.
        RuntimeError: a patch is in force already that was to come after one of them.
    """
    lines = []
    for patch in _ordered([get(name) for name in names]):
        if patch.name not in _in_force:
            if late := [name for name in _in_force if patch.name in get(name).after]:
                raise RuntimeError(f"the patch {patch.name} must be applied before {', '.join(late)}")
            patch.apply()
            _in_force.append(patch.name)
        lines.append(f"{patch.name}: {patch.why} ({patch.target})")
    return lines


def _ordered(patches: list[Patch]) -> list[Patch]:
    """The same, each after those that must come before it."""
    waiting, ordered = list(patches), []
    while waiting:
        names = {patch.name for patch in waiting}
        patch = next(patch for patch in waiting if not names & set(patch.after))
        waiting.remove(patch)
        ordered.append(patch)
    return ordered


def applied() -> tuple[str, ...]:
    """Names of the patches in force now, in the order of their application."""
    return tuple(_in_force)


def revert(*names: str) -> None:
    """Put the originals of the named patches back (of all, without names), last applied first."""
    for name in [name for name in reversed(_in_force) if name in (names or NAMES)]:
        get(name).revert()
        _in_force.remove(name)
