"""Query, key and value out of their joint projection, rotary positions applied, in one pass over memory (Triton).

Megatron's projection has, for every group of query heads that share a key, the queries, the key and the value behind
each other. Splitting, turning and joining them again in torch takes about ten passes in each direction.

Cosines and sines are rounded to the dtype of the model, as in transformers, and everything else is fp32.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _turn_heads(
    source,
    target,
    frequencies,
    positions,
    source_row,
    source_group,
    target_row,
    target_group,
    heads,
    heads_per_group,
    rows_per_position,
    HAS_POSITIONS: tl.constexpr,
    BACKWARD: tl.constexpr,
    HALF: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
    HEADS_BLOCK: tl.constexpr,
):
    """One token: element i and i + HALF of every head turn by frequencies[position, i]. Strides are in elements."""
    row = tl.program_id(0).to(tl.int64)
    position = tl.load(positions + row) if HAS_POSITIONS else row // rows_per_position
    column = tl.arange(0, HALF_BLOCK)
    in_head = column < HALF
    angle = tl.load(frequencies + position * (2 * HALF) + column, mask=in_head, other=0.0)
    dtype = source.dtype.element_ty
    cosine, sine = tl.cos(angle).to(dtype).to(tl.float32)[None], tl.sin(angle).to(dtype).to(tl.float32)[None]
    if BACKWARD:
        sine = -sine
    head = tl.arange(0, HEADS_BLOCK)[:, None]
    is_real = (head < heads) & in_head[None]
    group, place = head // heads_per_group, (head % heads_per_group) * (2 * HALF) + column[None]
    source += row * source_row + group * source_group + place
    target += row * target_row + group * target_group + place
    first = tl.load(source, mask=is_real, other=0.0).to(tl.float32)
    second = tl.load(source + HALF, mask=is_real, other=0.0).to(tl.float32)
    tl.store(target, (first * cosine - second * sine).to(dtype), mask=is_real)
    tl.store(target + HALF, (second * cosine + first * sine).to(dtype), mask=is_real)


def _turn(
    source: Tensor, target: Tensor, frequencies: Tensor, positions: Tensor | None, *, batch: int, backward: bool
) -> None:
    """source, target [rows, groups, heads per group, d], heads of a group behind each other."""
    rows, groups, heads_per_group, width = source.shape
    assert source.stride()[2:] == target.stride()[2:] == (width, 1), (source.stride(), target.stride())
    _turn_heads[(rows,)](  # type: ignore[index]
        source,
        target,
        frequencies,
        positions,
        source.stride(0),
        source.stride(1),
        target.stride(0),
        target.stride(1),
        groups * heads_per_group,
        heads_per_group,
        batch,
        HAS_POSITIONS=positions is not None,
        BACKWARD=backward,
        HALF=width // 2,
        HALF_BLOCK=triton.next_power_of_2(width // 2),
        HEADS_BLOCK=triton.next_power_of_2(groups * heads_per_group),
    )


class _SplitAndTurn(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, joint: Tensor, frequencies: Tensor, positions: Tensor | None, groups: int, width: int) -> Any:
        s, b, size = joint.shape
        parts = joint.view(s * b, groups, size // groups // width, width)
        query, key, value = parts[:, :, :-2], parts[:, :, -2:-1], parts[:, :, -1]
        turned = [joint.new_empty(part.shape) for part in (query, key)]
        for part, out in zip((query, key), turned, strict=True):
            _turn(part, out, frequencies, positions, batch=b, backward=False)
        ctx.save_for_backward(frequencies, positions)
        ctx.shape, ctx.parts_shape = joint.shape, parts.shape
        return *(out.view(s, b, -1, width) for out in turned), value.contiguous().view(s, b, groups, width)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        frequencies, positions = ctx.saved_tensors
        rows, groups, _, width = ctx.parts_shape
        joint = gradients[0].new_empty(ctx.parts_shape)
        for gradient, part in zip(gradients, (joint[:, :, :-2], joint[:, :, -2:-1]), strict=False):
            source = gradient.contiguous().view(rows, groups, -1, width)
            _turn(source, part, frequencies, positions, batch=ctx.shape[1], backward=True)
        joint = joint.view(*ctx.shape[:2], groups, -1, width)
        joint[..., -1, :] = gradients[2]
        return joint.view(ctx.shape), None, None, None, None


class _Turn(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, heads: Tensor, frequencies: Tensor, positions: Tensor | None) -> Tensor:
        ctx.save_for_backward(frequencies, positions)
        return _turned(heads, frequencies, positions, backward=False)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return _turned(gradient, *ctx.saved_tensors, backward=True), None, None


def _turned(heads: Tensor, frequencies: Tensor, positions: Tensor | None, *, backward: bool) -> Tensor:
    source = heads.contiguous().view(-1, 1, *heads.shape[2:])
    target = torch.empty_like(source)
    _turn(source, target, frequencies, positions, batch=heads.shape[1], backward=backward)
    return target.view(heads.shape)


def split_and_turn(
    joint: Tensor, frequencies: Tensor, *, groups: int, width: int, positions: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Query [s, b, heads, width], key and value [s, b, groups, width] of ``joint`` [s, b, groups * (heads / groups + 2)
    * width], all three contiguous; query and key turned by their positions.

    Args:
        frequencies: [positions, 1, 1, width] fp32, angles of every position, its second half as the first.
        positions: [s * b] of every token; None: the place in s.
    """
    return _SplitAndTurn.apply(joint.contiguous(), frequencies, positions, groups, width)


def turn(heads: Tensor, frequencies: Tensor, *, positions: Tensor | None = None) -> Tensor:
    """``heads`` [s, b, heads, width] turned by their positions; see :func:`split_and_turn`."""
    return _Turn.apply(heads, frequencies, positions)
