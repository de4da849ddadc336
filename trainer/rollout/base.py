"""What every rollout engine does and answers."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


@dataclass(frozen=True)
class Responses:
    """Responses to n prompts, tensors on the engine's device. A row is prompt, response, padding, without a gap.

    s is the longest row's length rounded up to a multiple of 8, at most max_prompt_tokens + max_new_tokens.

    Attributes:
        tokens: [n, s] int64.
        response_mask: [n, s] bool, True on response tokens, the end-of-sequence token included.
        truncated: [n] bool, True where max_new_tokens were drawn and none of them ended the response.
        texts: n decoded responses without special tokens.
        log_probs: [n, s] fp32, the engine's own log-prob of each response token under softmax(logits / temperature),
            so before top-p; 0 elsewhere.
    """

    tokens: Tensor
    response_mask: Tensor
    truncated: Tensor
    texts: list[str]
    log_probs: Tensor


class RolloutEngine(Protocol):
    """A language model for sampling only, which sleeps while others train and wakes up with their weights."""

    def wake_up(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Take device memory and load ``weights``, (Hugging Face name, tensor) pairs of every parameter."""
        ...

    def sleep(self) -> None:
        """Release the weights' memory; their bytes are lost."""
        ...

    def generate(self, prompts: list[list[int]], *, seed: int, greedy: bool = False) -> Responses:
        """One response per prompt. Equal weights, prompts and seed give equal responses, whatever ran before."""
        ...
