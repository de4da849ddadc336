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

# Columns of a row's state: TOKEN is the newest one, whose keys and values are not in the cache yet, and POSITION its
# place in the row; COLUMN is the number of tokens drawn, LIMIT the most that may be; ALIVE is 1 until the last one.
TOKEN, POSITION, COLUMN, LIMIT, ALIVE = range(5)


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


def place(qkv: Tensor, cos: Tensor, sin: Tensor, cache: Tensor, places: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Turn queries and keys by their positions, and write keys and values where the cache wants them.

    Rotary positions (arXiv:2104.09864): with halves a and b of a head, (a cos - b sin, b cos + a sin).

    Args:
        qkv: [t, g, m + 2, d], m query heads, the key and the value of each group.
        cos, sin: [t, 1, 1, d]; the sign is in ``sin``.
        cache: [tokens, g, 2, d].
        places: [t] int64, tokens of the cache.

    Returns:
        (query [t, g * m, d], key [t, g, d], value [t, g, d]).
    """
    heads, value = qkv[:, :, :-1], qkv[:, :, -1]
    first, second = heads.chunk(2, dim=-1)
    turned = torch.addcmul(heads * cos, torch.cat([second, first], dim=-1), sin)
    key = turned[:, :, -1]
    cache.index_put_((places,), torch.stack([key, value], dim=2))
    return turned[:, :, :-1].flatten(1, 2), key, value


def gated(both: Tensor) -> Tensor:
    """SwiGLU (arXiv:2002.05202): [..., 2 f], gate and up projection -> [..., f]."""
    gate, up = both.chunk(2, dim=-1)
    return functional.silu(gate) * up


def begin(slots: Tensor, state: Tensor, pages: Tensor, rotary: Tensor, page_tokens: int) -> tuple[Tensor, ...]:
    """What a decoding step needs to know of its rows.

    Args:
        slots: [n] int64.
        state, pages, rotary: of :class:`trainer.rollout.native.slots.Slots`.

    Returns:
        (state [n, 5], pages [n, pages per row], places [n], cosines and sines [n, 1, 1, d], keys [n] int32): those of
        the rows; ``places`` of their newest tokens in the cache, ``keys``: how many each has, the newest included.
    """
    own, own_pages = state[slots], pages[slots]
    position = own[:, POSITION]
    page = own_pages.gather(1, (position // page_tokens)[:, None]).squeeze(1).long()
    places = page * page_tokens + position % page_tokens
    return own, own_pages, places, rotary[0][position], rotary[1][position], (position + 1).int()


def note(
    slots: Tensor, own: Tensor, drawn: sampling.Drawn, state: Tensor, tokens: Tensor, log_probs: Tensor, is_stop: Tensor
) -> None:
    """Write down what rows that are alive have drawn, and end those that a stop token or the limit ends.

    Args:
        own: [n, 5], the rows' state before.
        state, tokens, log_probs, is_stop: of :class:`trainer.rollout.native.slots.Slots`.
    """
    alive, column = own[:, ALIVE], own[:, COLUMN]
    is_alive = alive.bool()
    target = column.where(is_alive, tokens.shape[1] - 1)
    tokens.index_put_((slots, target), drawn.tokens)
    log_probs.index_put_((slots, target), torch.stack([drawn.log_probs, drawn.drawn_log_probs], dim=1))
    ends = is_stop[drawn.tokens] | (column + 1 >= own[:, LIMIT])
    token = drawn.tokens.where(is_alive, own[:, TOKEN])
    columns = [token, own[:, POSITION] + alive, column + alive, own[:, LIMIT], alive.where(~ends, 0)]
    state.index_put_((slots,), torch.stack(columns, dim=1))


@dataclass(frozen=True)
class Pieces:
    """The functions of this module and :func:`trainer.rollout.native.sampling.draw`, compiled or not."""

    norm: Callable[[Tensor, Tensor, float], Tensor]
    add_and_norm: Callable[[Tensor, Tensor, Tensor, float], tuple[Tensor, Tensor]]
    place: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]
    gated: Callable[[Tensor], Tensor]
    begin: Callable[[Tensor, Tensor, Tensor, Tensor, int], tuple[Tensor, ...]]
    draw: Callable[[Tensor, Tensor, sampling.Sampling], sampling.Drawn]
    note: Callable[[Tensor, Tensor, sampling.Drawn, Tensor, Tensor, Tensor, Tensor], None]


PLAIN = Pieces(norm, add_and_norm, place, gated, begin, sampling.draw, note)


def compiled() -> Pieces:
    """Compiled on first use, once more when the number of rows changes, and then for every number."""
    return Pieces(
        norm=torch.compile(norm),
        add_and_norm=torch.compile(add_and_norm),
        place=torch.compile(place),
        gated=torch.compile(gated),
        begin=torch.compile(begin),
        draw=torch.compile(sampling.draw),
        note=torch.compile(note),
    )
