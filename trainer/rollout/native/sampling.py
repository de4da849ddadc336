"""From logits to tokens: temperature, top-k, top-p, min-p, and one uniform number per token drawn.

A token is where the running sum of the probabilities passes the uniform number, which is a hash of (seed, number of the
response, number of the token): so a draw depends neither on the other rows of a batch nor on the rank that makes it.
n rows, v entries of the vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

_BLOCK = 256  # entries that are summed before the search; a running sum over a whole vocabulary is slow on a GPU


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn. In this order: ``temperature``; the ``top_k`` most probable tokens (0: all); the fewest
    that have ``top_p`` together; those with at least ``min_p`` of the probability of the most probable one.
    ``greedy`` takes the most probable instead, its log-probs still under the temperature."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    greedy: bool


@dataclass(frozen=True)
class Drawn:
    """One token of each row: ``tokens`` [n] int64; ``log_probs`` [n] fp32 under softmax(logits / temperature);
    ``drawn_log_probs`` [n] fp32 under the distribution that is left after top-k, top-p and min-p (greedy: 0)."""

    tokens: Tensor
    log_probs: Tensor
    drawn_log_probs: Tensor


def draw(logits: Tensor, uniforms: Tensor, sampling: Sampling) -> Drawn:
    """One token of each row. logits [n, v]; uniforms [n] fp32 in [0, 1). Rows with a NaN get NaN log-probs."""
    if sampling.temperature == 1.0:
        probabilities = logits.softmax(dim=-1, dtype=torch.float32)
    else:
        probabilities = (logits.float() / sampling.temperature).softmax(dim=-1)
    if sampling.greedy:
        best, tokens = probabilities.max(dim=-1)
        return Drawn(tokens, best.log(), torch.zeros_like(best))
    kept = kept_probabilities(probabilities, sampling)
    tokens, mass = _search(kept, uniforms)
    own = probabilities.gather(1, tokens[:, None]).squeeze(1)
    log_probs = own.log()
    return Drawn(tokens, log_probs, log_probs if kept is probabilities else (own / mass).log())


def kept_probabilities(probabilities: Tensor, sampling: Sampling) -> Tensor:
    """probabilities [n, v] with zeros where top-k, top-p and min-p leave nothing, not normalised again."""
    kept = probabilities
    if 0 < sampling.top_k < kept.shape[-1]:
        smallest = kept.topk(sampling.top_k, dim=-1).values[:, -1:]
        kept = kept.where(kept >= smallest, 0.0)
    if sampling.top_p < 1.0:
        descending = kept.sort(dim=-1, descending=True).values
        sums = descending.cumsum(dim=-1)
        # The last token that is kept is the first one whose sum reaches the share.
        last = (sums < sampling.top_p * sums[:, -1:]).sum(dim=-1, keepdim=True).clamp(max=kept.shape[-1] - 1)
        kept = kept.where(kept >= descending.gather(1, last), 0.0)
    if sampling.min_p > 0.0:
        kept = kept.where(kept >= sampling.min_p * kept.amax(dim=-1, keepdim=True), 0.0)
    return kept


def _search(weights: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor]:
    """weights [n, v] >= 0, not all 0 in a row -> (the entry at which the running sum passes ``uniforms`` of the whole,
    [n]; the sum of each row, [n]). An entry of weight 0 is never found."""
    padded = functional.pad(weights, (0, -weights.shape[1] % _BLOCK)) if weights.shape[1] % _BLOCK else weights
    blocks = padded.unflatten(1, (-1, _BLOCK))
    ends = blocks.sum(dim=-1).cumsum(dim=-1)
    total = ends[:, -1:]
    target = _below(uniforms[:, None] * total, total)
    block = torch.searchsorted(ends, target, right=True).clamp(max=ends.shape[1] - 1)
    before = ends.gather(1, (block - 1).clamp(min=0)).where(block > 0, 0.0)
    inner = blocks.gather(1, block[:, :, None].expand(-1, -1, _BLOCK)).squeeze(1).cumsum(dim=-1)
    entry = torch.searchsorted(inner, _below(target - before, inner[:, -1:]), right=True)
    tokens = (block * _BLOCK + entry).squeeze(1).clamp(max=weights.shape[1] - 1)  # what NaN finds lies anywhere
    return tokens, total.squeeze(1)


def _below(value: Tensor, limit: Tensor) -> Tensor:
    """``value``, or the largest number below ``limit``: rounding must not lead past the last positive weight."""
    return torch.minimum(value, torch.nextafter(limit, torch.zeros_like(limit))).clamp(min=0.0)


# ---- uniform numbers -----------------------------------------------------------------------------------------------

_GOLDEN = -7046029254386353131  # 0x9E3779B97F4A7C15 as a signed number
_FIRST = -4658895280553007687  # 0xBF58476D1CE4E5B9
_SECOND = -7723592293110705685  # 0x94D049BB133111EB


def uniforms(seed: int, numbers: Tensor, *, columns: int) -> Tensor:
    """[n, columns] fp32 in [0, 1), 24 random bits each: a hash of (seed, numbers[i], column).

    The hash is SplitMix64 (Steele, Lea, Flood: Fast splittable pseudorandom number generators, OOPSLA 2014).

    Args:
        numbers: [n] int64.
    """
    steps = torch.arange(1, columns + 1, device=numbers.device) * _GOLDEN
    keys = _mixed(_mixed(torch.tensor(seed, device=numbers.device)) + numbers * _GOLDEN)
    bits = _mixed(keys[:, None] + steps)
    return _shifted(bits, 40).float() * 2.0**-24


def _mixed(values: Tensor) -> Tensor:
    values = (values ^ _shifted(values, 30)) * _FIRST
    values = (values ^ _shifted(values, 27)) * _SECOND
    return values ^ _shifted(values, 31)


def _shifted(values: Tensor, bits: int) -> Tensor:
    """To the right, as unsigned numbers."""
    return (values >> bits) & ((1 << (64 - bits)) - 1)
