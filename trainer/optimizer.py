"""Megatron's optimizer and learning-rate schedule for one role, its state in one flat tensor.

megatron-core makes main params and moments as many small tensors. torch_memory_saver copies whole allocator segments,
dead blocks included, so right after the build all of them move into one exact-size tensor in the role's region.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
from megatron.core.optimizer import get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from trainer.config import RoleConfig
from trainer.models.build import DTYPES

_ALIGNMENT_ELEMENTS = 16  # 64 bytes of fp32: other offsets change the bits of CPU kernels
_STATE_KEYS = ("exp_avg", "exp_avg_sq")


def build_optimizer(
    chunks: list[Any], role_config: RoleConfig, *, region: AbstractContextManager[None]
) -> tuple[Any, torch.Tensor]:
    """Megatron's optimizer over ``chunks`` and the flat fp32 tensor [n] that holds its whole state.

    Args:
        region: the flat tensor is allocated inside.
    """
    settings = role_config.optimizer
    optimizer = get_megatron_optimizer(
        MegatronOptimizerConfig(
            optimizer="adam",
            lr=settings.lr,
            min_lr=settings.lr * settings.min_lr_ratio,
            weight_decay=settings.weight_decay,
            adam_beta1=settings.beta1,
            adam_beta2=settings.beta2,
            adam_eps=settings.eps,
            clip_grad=settings.clip_grad,
            bf16=role_config.model.dtype == "bf16",
            params_dtype=DTYPES[role_config.model.dtype],
            use_distributed_optimizer=role_config.ddp.use_distributed_optimizer,
            overlap_param_gather=role_config.ddp.overlap_param_gather,
        ),
        chunks,
        use_gloo_process_groups=False,
    )
    return optimizer, _rehome(optimizer, chunks, region)


def build_scheduler(optimizer: Any, role_config: RoleConfig, *, total_steps: int) -> OptimizerParamScheduler:
    """Megatron's schedule over ``total_steps`` optimizer steps: warm-up, then constant, linear or cosine decay."""
    settings = role_config.optimizer
    return OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=settings.lr,
        min_lr=settings.lr * settings.min_lr_ratio,
        lr_warmup_steps=settings.lr_warmup_steps,
        lr_decay_steps=max(total_steps, settings.lr_warmup_steps + 1),
        lr_decay_style=settings.lr_schedule,
        start_wd=settings.weight_decay,
        end_wd=settings.weight_decay,
        wd_incr_steps=0,
        wd_incr_style="constant",
    )


def inner_optimizers(optimizer: Any) -> list[Any]:
    """The Megatron optimizers that hold state (dense, expert); stubs without parameters left out."""
    chained = getattr(optimizer, "chained_optimizers", [optimizer])
    return [inner for inner in chained if inner.optimizer is not None]


def _optimized_params(optimizer: Any) -> Iterator[tuple[Any, torch.Tensor]]:
    for inner in inner_optimizers(optimizer):
        for group in inner.optimizer.param_groups:
            for param in group["params"]:
                yield inner.optimizer, param


def _rehome(optimizer: Any, chunks: list[Any], region: AbstractContextManager[None]) -> torch.Tensor:
    """Move main params and moments into one flat tensor of the region; every view starts 64-byte aligned.

    An fp32 parameter's main param is a view of its parameter buffer in Megatron; here it becomes a copy in the flat
    tensor, so that parameters of every dtype can be rebuilt from main params. Without the distributed optimizer
    such a parameter is its own main param and stays where it is.
    """
    model_params = {id(param) for chunk in chunks for param in chunk.parameters()}
    moves: list[tuple[torch.Tensor, torch.optim.Optimizer | None, str]] = []
    for torch_optimizer, param in _optimized_params(optimizer):
        if id(param) not in model_params:
            moves.append((param, None, ""))
        torch_optimizer.state[param] = {key: torch.zeros_like(param.data) for key in _STATE_KEYS}
        moves += [(param, torch_optimizer, key) for key in _STATE_KEYS]

    sizes = [math.ceil(param.numel() / _ALIGNMENT_ELEMENTS) * _ALIGNMENT_ELEMENTS for param, _, _ in moves]
    with region:
        flat = torch.zeros(sum(sizes), dtype=torch.float32, device=torch.cuda.current_device())
    offset = 0
    for (param, torch_optimizer, key), size in zip(moves, sizes, strict=True):
        view = flat[offset : offset + param.numel()].view(param.shape)
        if torch_optimizer is None:
            view.copy_(param.data)
            param.data = view
        else:
            torch_optimizer.state[param][key] = view
        offset += size
    return flat


def copy_main_to_model_params(optimizer: Any, chunks: list[Any]) -> None:
    """Rebuild the parameter buffers from the fp32 main params: cast this rank's shard, all-gather the rest.

    Bit-identical to what the last step left, which did the same two things. Collective over the data-parallel group.
    """
    for inner in inner_optimizers(optimizer):
        inner._copy_main_params_to_model_params()
    for chunk in chunks:
        chunk.start_param_sync(force_sync=True)


def set_learning_rate(optimizer: Any, learning_rate: float) -> None:
    """Set the learning rate of every group, outside of any schedule."""
    for group in optimizer.param_groups:
        group["lr"] = learning_rate


def step(optimizer: Any) -> tuple[bool, float]:
    """Clip, step, and gather parameters. A gradient norm that is not finite skips the step.

    Returns:
        (whether the weights were updated, gradient norm before clipping).
    """
    optimizer.prepare_grads()
    grad_norm = float(optimizer.get_grad_norm())
    if not math.isfinite(grad_norm):
        return False, grad_norm
    updated, _, _ = optimizer.step()
    return bool(updated), grad_norm


def learning_rate(optimizer: Any) -> float:
    """The learning rate of the next step."""
    return float(optimizer.param_groups[0]["lr"])
