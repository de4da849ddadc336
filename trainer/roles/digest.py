"""A digest of tensors that is computed where they lie: no byte of a model has to cross to the host for it.

Multilinear hashing modulo 2**64 (Carter and Wegman, "Universal classes of hash functions", 1979): the sum of all words
times odd coefficients that follow from their places. Sums of integers modulo 2**64 depend neither on the order of
adding nor on how a stream of words is cut into tensors, so every device finds the same. Against accidents, not against
an adversary.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterable

import torch
from torch import Tensor

_ROW = 2**16  # words
_ROWS_AT_ONCE = 2**6  # 32 MiB of products
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by the bytes of an element


def digest(streams: Iterable[tuple[str, Iterable[Tensor]]]) -> str:
    """SHA-256 (hex) of each stream's name, number of words and 128-bit hash, in the order given. A stream is what lies
    in its tensors, one after the other."""
    found = hashlib.sha256()
    for name, tensors in streams:
        count, hashes = 0, (0, 0)
        for tensor in tensors:
            words = tensor.detach().contiguous().view(-1).view(_WORDS[tensor.element_size()])
            first, second = _coefficients(tensor.device)
            hashes = (
                hashes[0] + _sum(words, count, first, second),
                hashes[1] + _sum(words, count, second, first),
            )
            count += len(words)
        found.update(repr((name, count, *(h % 2**64 for h in hashes))).encode())
    return found.hexdigest()


def _sum(words: Tensor, begin: int, in_row: Tensor, of_row: Tensor) -> int:
    """Of ``words`` [n], the first of which is number ``begin`` of its stream, times their coefficients. A word's is
    that of its place in its row times that of its row."""
    total, at = 0, 0
    while at < len(words):
        row, column = divmod(begin + at, _ROW)
        if column or len(words) - at < _ROW:  # part of a row
            some = words[at : at + _ROW - column]
            sums = (some * in_row[column : column + len(some)]).sum().view(1)
        else:
            rows = min((len(words) - at) // _ROW, _ROWS_AT_ONCE)
            some = words[at : at + rows * _ROW]
            sums = (some.view(rows, _ROW) * in_row).sum(dim=1)
        places = torch.arange(row, row + len(sums), device=words.device)
        total += int((sums * of_row[places % _ROW] * (2 * (places // _ROW) + 1)).sum())
        at += len(some)
    return total


@functools.cache
def _coefficients(device: torch.device) -> tuple[Tensor, Tensor]:
    """Two rows of odd numbers, so that any changed bit of a word changes the sum."""
    generator = torch.Generator().manual_seed(0)
    low, high = -(2**63), 2**63 - 1
    first, second = (torch.randint(low, high, (_ROW,), generator=generator) | 1 for _ in range(2))
    return first.to(device), second.to(device)
