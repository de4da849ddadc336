"""Megatron's fused functions stay eager, since decorating them with torch.compile would import inductor.

Target: the name jit_fuser of megatron.core.jit, which decorates functions of megatron.core as it is imported.
Why: the first call of torch.compile imports torch's compiler, more than a second of every worker's start, for functions
    that no run of ours calls: bias, dropout and activation are not fused by Megatron here (see
    trainer.megatron.build.transformer_config).
How: while megatron.core is imported for the first time, torch.compile hands functions back as they are; afterwards
    jit_fuser does. torch.compile itself is then as before, for rollout.compile.
Upstream: https://github.com/NVIDIA/Megatron-LM (megatron/core/jit.py has disable_jit_fuser, which comes too late for
    what megatron.core itself imports).
Remove when: megatron-core decorates on first use, or torch.compile decorates without its compiler.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any
from unittest import mock

import torch

from patches.registry import Patch, Replacement, missing_names


def _eager(function: Callable[..., Any] | None = None, **_: Any) -> Callable[..., Any]:
    return (lambda decorated: decorated) if function is None else function


def _replacements() -> list[Replacement]:
    is_first = "megatron.core" not in sys.modules
    importing: AbstractContextManager[Any] = mock.patch.object(torch, "compile", _eager) if is_first else nullcontext()
    with importing:
        from megatron.core import jit
    return [(jit, "jit_fuser", _eager)]


def _probe() -> tuple[str, str]:
    from megatron.core import jit

    missing = missing_names([(jit, "jit_fuser", _eager)])
    return ("CHANGED", f"megatron-core has no {', '.join(missing)}") if missing else ("OK", "applies")


PATCH = Patch(
    name="eager_fusions",
    target="megatron.core.jit.jit_fuser",
    why="workers start without torch's compiler",
    replacements=_replacements,
    probe=_probe,
)
