"""What every rollout engine does and answers."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from torch import Tensor

if TYPE_CHECKING:
    from trainer.roles.role import Role


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
    """Draws responses under the actor's weights, and sleeps while others are at work.

    Attributes:
        has_own_weights: it samples from a copy, which :meth:`sync` brings up to date before a rollout, and the actor
            sleeps in the rollout. Otherwise it computes with the actor's own parameters and :meth:`awake` wakes these.
    """

    has_own_weights: bool

    def sync(self, actor: Role) -> None:
        """Wake up with a copy of the actor's weights; the actor is asleep before and after. Nothing to do for an engine
        without weights of its own."""
        ...

    def awake(self) -> AbstractContextManager[None]:
        """:meth:`generate` works inside; after it, the engine is asleep. Communicators may be gone inside (see
        :mod:`patches.reloadable_groups`) where the engine needs none."""
        ...

    def generate(self, prompts: list[list[int]], *, seed: int, greedy: bool = False) -> Responses:
        """One response per prompt. Equal weights, prompts and seed give equal responses, whatever ran before."""
        ...

    def sleep(self) -> None:
        """Release what the engine holds; its bytes are lost. An engine that is asleep stays so."""
        ...
