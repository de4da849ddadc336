"""vLLM's weights and keys and values in regions of the caller's.

Target: ``Worker._maybe_get_memory_pool_context`` of ``vllm.v1.worker.gpu_worker``, ``dispatch_cpu_unquantized_gemm`` of
    ``vllm.model_executor.layers.utils``, ``_get_attn_isa`` of ``vllm.v1.attention.backends.cpu_attn``.
Why: an engine that sleeps needs its memory in regions of the memory saver. vLLM's own sleep mode has an allocator of
    its own, and none on a CPU. There it also packs weights anew behind handles, which a later change of the weights
    misses, and its attention ends the process where the system grants no AMX tiles.
How: inside :func:`allocations_in` what vLLM allocates for a tag of its own (``weights``, ``kv_cache`` and others) is
    made in the context that the caller gives; matrices of a CPU stay parameters, multiplied by torch. Elsewhere the
    originals answer. Attention on a CPU uses vector units alone.
Upstream: nothing proposed yet.
Remove when: vLLM takes an allocator from outside, on CPUs too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from importlib.util import find_spec
from typing import Any

from torch.nn import functional

from patches.registry import Patch, Replacement, missing_names

_region_for: Callable[[str], AbstractContextManager[Any]] | None = None


@contextmanager
def allocations_in(region_for: Callable[[str], AbstractContextManager[Any]]) -> Iterator[None]:
    """Inside, vLLM allocates in ``region_for(tag)``."""
    global _region_for
    _region_for = region_for
    try:
        yield
    finally:
        _region_for = None


def _replacements() -> list[Replacement]:
    from vllm.model_executor.layers import utils
    from vllm.v1.attention.backends import cpu_attn
    from vllm.v1.worker.gpu_worker import Worker

    own_context, own_gemm = Worker._maybe_get_memory_pool_context, utils.dispatch_cpu_unquantized_gemm
    own_isa = cpu_attn._get_attn_isa

    def pool_context(self: Any, tag: str) -> AbstractContextManager[Any]:
        return own_context(self, tag) if _region_for is None else _region_for(tag)

    def gemm(layer: Any, remove_weight: bool) -> None:
        if _region_for is None:
            own_gemm(layer, remove_weight)
        else:
            layer.cpu_linear = functional.linear

    def attention_isa(*args: Any, **kwargs: Any) -> str:
        return "vec" if (isa := own_isa(*args, **kwargs)) == "amx" else isa

    return [
        (Worker, "_maybe_get_memory_pool_context", pool_context),
        (utils, "dispatch_cpu_unquantized_gemm", gemm),
        (cpu_attn, "_get_attn_isa", attention_isa),
    ]


def _probe() -> tuple[str, str]:
    if find_spec("vllm") is None:
        return "OK", "vllm is not installed"
    missing = missing_names(_replacements())
    return ("CHANGED", f"vllm no longer has {', '.join(missing)}") if missing else ("OK", "applies")


PATCH = Patch(
    name="vllm_memory",
    target="memory pools of vllm's worker, its matrix products on a CPU",
    why="what vllm holds lies in memory-saver regions",
    replacements=_replacements,
    probe=_probe,
)
