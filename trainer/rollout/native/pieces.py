"""The elementwise parts of a pass, between its matrix products and attention, as plain functions of tensors.

With ``rollout.compile`` each of them becomes one kernel of torch.compile's; they are few and shared by all layers, so
that a first step waits seconds for them and not half a minute for a whole model.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from trainer.rollout.native import sampling


def norm(states: Tensor, weight: Tensor, eps: float) -> Tensor:
    """The root-mean-square norm of :class:`trainer.megatron.layers.RmsNorm`; on a GPU as one kernel, which rounds to
    the model's dtype once instead of twice."""
    if states.is_cuda:
        return functional.rms_norm(states, states.shape[-1:], weight, eps)
    return weight * functional.rms_norm(states.float(), states.shape[-1:], eps=eps).to(states.dtype)


def add_and_norm(states: Tensor, branch: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The residual sum of ``states`` and a layer's ``branch``, and its norm."""
    states = states + branch
    return states, norm(states, weight, eps)


def rotate(heads: Tensor, cos: Tensor, sin: Tensor) -> None:
    """Rotary positions (arXiv:2104.09864) of heads [t, g, heads, d], in place: with halves a and b of a head,
    (a cos - b sin, b cos + a sin). The sign is in ``sin`` [t, 1, 1, d]."""
    first, second = heads.chunk(2, dim=-1)
    swapped = torch.cat([second, first], dim=-1)
    heads.mul_(cos).addcmul_(swapped, sin)


def gated(both: Tensor) -> Tensor:
    """SwiGLU (arXiv:2002.05202): [..., 2 f], gate and up projection -> [..., f]."""
    gate, up = both.chunk(2, dim=-1)
    return functional.silu(gate) * up


@dataclass(frozen=True)
class Pieces:
    """The functions of this module and :func:`trainer.rollout.native.sampling.draw`, compiled or not."""

    norm: Callable[[Tensor, Tensor, float], Tensor]
    add_and_norm: Callable[[Tensor, Tensor, Tensor, float], tuple[Tensor, Tensor]]
    rotate: Callable[[Tensor, Tensor, Tensor], None]
    gated: Callable[[Tensor], Tensor]
    draw: Callable[[Tensor, Tensor, sampling.Sampling], sampling.Drawn]


PLAIN = Pieces(norm, add_and_norm, rotate, gated, sampling.draw)


def compiled() -> Pieces:
    """Compiled on first use, once more when the number of rows changes, and then for every number."""
    return Pieces(
        norm=torch.compile(norm),
        add_and_norm=torch.compile(add_and_norm),
        rotate=torch.compile(rotate),
        gated=torch.compile(gated),
        draw=torch.compile(sampling.draw),
    )
