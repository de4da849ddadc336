"""Strings that end a response. Token ids that do are looked up by each engine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


class StopStrings:
    """A response ends with the token that completes one of ``strings``; no text after it is kept."""

    def __init__(self, strings: Sequence[str], tokenizer: Any) -> None:
        self._strings, self._tokenizer = tuple(strings), tokenizer
        # Every token adds a byte at least, so no stop string reaches further back than this.
        self._reach = max((len(string.encode()) for string in strings), default=0)

    def __bool__(self) -> bool:
        return bool(self._strings)

    def length_at_stop(self, tokens: Sequence[int], *, checked: int) -> int | None:
        """Tokens of the response up to the first stop string, of whose ``tokens`` the first ``checked`` have been
        looked through; None: there is no such string."""
        start = max(0, checked - self._reach)
        if not self._is_in(tokens[start:]):
            return None
        ends = range(checked + 1, len(tokens))
        return next((end for end in ends if self._is_in(tokens[start:end])), len(tokens))

    def lengths(self, rows: Sequence[Sequence[int]], lengths: Sequence[int]) -> Tensor:
        """[n] int64, of whole responses: tokens up to the first stop string, 0 where there is none."""
        found = [self.length_at_stop(row[:end], checked=0) or 0 for row, end in zip(rows, lengths, strict=True)]
        return torch.tensor(found)

    def _is_in(self, tokens: Sequence[int]) -> bool:
        text = self._tokenizer.decode(tokens, skip_special_tokens=True)
        return any(string in text for string in self._strings)
