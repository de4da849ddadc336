"""What :mod:`trainer.algo.log_probs` computes from logits, in one kernel each way that reads them once (Triton)."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 4096


@triton.jit
def _statistics(
    logits,
    targets,
    log_partition,
    target_logits,
    entropy,
    row_stride,
    temperature,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One token. With m the largest z so far, sums of e = exp(z - m) and of e * (z - m) are carried along."""
    row = tl.program_id(0).to(tl.int64)
    logits += row * row_stride
    largest = tl.full((), float("-inf"), tl.float32)
    total = tl.full((), 0.0, tl.float32)
    weighted = tl.full((), 0.0, tl.float32)
    for start in range(0, SIZE, BLOCK):
        column = start + tl.arange(0, BLOCK)
        z = tl.load(logits + column, mask=column < SIZE, other=float("-inf")).to(tl.float32) / temperature
        new = tl.maximum(largest, tl.max(z, axis=0))
        base = tl.where(new == float("-inf"), 0.0, new)
        down = tl.where(largest == float("-inf"), 0.0, largest - base)
        e = tl.exp(z - base)
        weighted = tl.exp(down) * (weighted + down * total) + tl.sum(tl.where(e > 0, e * (z - base), 0.0), axis=0)
        total = tl.exp(down) * total + tl.sum(e, axis=0)
        largest = new
    tl.store(log_partition + row, largest + tl.log(total))
    tl.store(entropy + row, tl.log(total) - weighted / total)
    target = tl.load(targets + row)
    is_own = (target >= 0) & (target < SIZE)
    tl.store(target_logits + row, tl.load(logits + target, mask=is_own, other=0.0).to(tl.float32) / temperature)


@triton.jit
def _gradient(
    logits,
    targets,
    log_partition,
    entropy,
    grad_log_probs,
    grad_entropy,
    result,
    row_stride,
    result_stride,
    size,
    width,
    temperature,
    HAS_LOG_PROBS: tl.constexpr,
    HAS_ENTROPY: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One token and BLOCK entries of the vocabulary."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    z = tl.load(logits + row * row_stride + column, mask=column < size, other=float("-inf")).to(tl.float32)
    log_p = z / temperature - tl.load(log_partition + row)
    p = tl.exp(log_p)
    grad = tl.zeros((BLOCK,), tl.float32)
    use = 0.0
    if HAS_LOG_PROBS:
        upstream = tl.load(grad_log_probs + row)
        grad += upstream * ((column == tl.load(targets + row)).to(tl.float32) - p)
        use += tl.abs(upstream)
    if HAS_ENTROPY:
        upstream = tl.load(grad_entropy + row)
        grad -= upstream * tl.where(p > 0, p * (log_p + tl.load(entropy + row)), 0.0)
        use += tl.abs(upstream)
    grad = tl.where(column < size, tl.where(use == 0, 0.0, grad / temperature), 0.0)
    tl.store(result + row * result_stride + column, grad.to(result.dtype.element_ty), mask=column < width)


def statistics(logits: Tensor, targets: Tensor, *, size: int, temperature: float) -> tuple[Tensor, Tensor, Tensor]:
    """See :func:`trainer.algo.log_probs_torch.statistics`."""
    found = [torch.empty(len(logits), dtype=torch.float32, device=logits.device) for _ in range(3)]
    if len(logits):
        _statistics[(len(logits),)](  # type: ignore[index]
            logits, targets, *found, logits.stride(0), temperature, SIZE=size, BLOCK=_BLOCK, num_warps=8
        )
    return found[0], found[1], found[2]


def gradient(
    logits: Tensor,
    targets: Tensor,
    log_partition: Tensor,
    entropy: Tensor,
    grad_log_probs: Tensor | None,
    grad_entropy: Tensor | None,
    *,
    size: int,
    temperature: float,
    in_place: bool,
) -> Tensor:
    """See :func:`trainer.algo.log_probs_torch.gradient`."""
    result, width = logits if in_place else torch.empty_like(logits), logits.shape[1]
    if len(logits):
        _gradient[(len(logits), triton.cdiv(width, _BLOCK))](  # type: ignore[index]
            logits,
            targets,
            log_partition,
            entropy,
            grad_log_probs.contiguous() if grad_log_probs is not None else log_partition,
            grad_entropy.contiguous() if grad_entropy is not None else log_partition,
            result,
            logits.stride(0),
            result.stride(0),
            size,
            width,
            temperature,
            HAS_LOG_PROBS=grad_log_probs is not None,
            HAS_ENTROPY=grad_entropy is not None,
            BLOCK=_BLOCK,
            num_warps=8,
        )
    return result
