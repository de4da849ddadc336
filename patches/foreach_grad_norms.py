"""Norms and clipping of gradients without a wait for the GPU in every parameter.

Target: the names l2_norm_impl, multi_tensor_scale_impl of megatron.core.optimizer.clip_grads.
Why: where neither Transformer Engine nor Apex is installed, megatron-core's norm reads one number per parameter back to
    the host (torch.tensor of a list of CUDA tensors), about 150 waits for a model of 24 layers, and scales one by one.
How: the norms of all tensors by torch._foreach_norm, their norm on the device too; scaling by torch._foreach_mul_. On a
    CPU the same bits as before.
Upstream: https://github.com/NVIDIA/Megatron-LM (megatron/core/utils.py, local_multi_tensor_l2_norm).
Remove when: megatron-core's fallback keeps the norms on the device.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from patches.registry import Patch, Replacement, missing_names


def l2_norm(
    chunk_size: int, noop_flag: Tensor, tensor_lists: Sequence[Sequence[Tensor]], per_tensor: bool, *_: object
) -> tuple[Tensor, None]:
    """The L2 norm [1] of all tensors together, as amp_C.multi_tensor_l2norm gives it; no norms by tensor."""
    norms = torch._foreach_norm([tensor for tensors in tensor_lists for tensor in tensors])
    return torch.linalg.vector_norm(torch.stack(norms)).float().view(1), None


def scale(chunk_size: int, noop_flag: Tensor, tensor_lists: Sequence[Sequence[Tensor]], factor: float) -> None:
    """Write each tensor of the first list, times ``factor``, to that of the second: amp_C.multi_tensor_scale."""
    sources, targets = (list(tensors) for tensors in tensor_lists)
    if any(source is not target for source, target in zip(sources, targets, strict=True)):
        torch._foreach_copy_(targets, sources)
    torch._foreach_mul_(targets, factor)


def _replacements() -> list[Replacement]:
    from megatron.core import utils
    from megatron.core.optimizer import clip_grads

    if clip_grads.l2_norm_impl is not utils.local_multi_tensor_l2_norm:  # TE or Apex is there: nothing to replace
        return []
    return [(clip_grads, "l2_norm_impl", l2_norm), (clip_grads, "multi_tensor_scale_impl", scale)]


def _probe() -> tuple[str, str]:
    try:
        replacements = _replacements()
    except AttributeError as error:
        return "CHANGED", str(error)
    if not replacements:
        return "OK", "not needed: Transformer Engine or Apex is there"
    missing = missing_names(replacements)
    return ("CHANGED", f"there is no {', '.join(missing)}") if missing else ("OK", "applies")


PATCH = Patch(
    name="foreach_grad_norms",
    target="l2_norm_impl and multi_tensor_scale_impl of megatron.core.optimizer.clip_grads",
    why="gradient norms without a wait for the GPU in every parameter",
    replacements=_replacements,
    probe=_probe,
    after=("cpu_platform",),  # importing megatron looks for a GPU
)
