"""What every rollout engine does and answers."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor

if TYPE_CHECKING:
    from trainer.roles.role import Role


@dataclass(frozen=True)
class Responses:
    """Responses to n prompts, tensors on the engine's device. A row is prompt, response, padding, without a gap.

    s is the longest row's length rounded up to a multiple of 8, at most max_prompt_tokens + max_new_tokens.

    Attributes:
        tokens: [n, s] int64.
        response_mask: [n, s] bool, True on response tokens, the one that ended it included.
        truncated: [n] bool, True where max_new_tokens were drawn and none of them ended the response.
        texts: n decoded responses, without special tokens and without the token that ended them.
        log_probs: [n, s] fp32, the engine's own log-prob of each response token under softmax(logits / temperature),
            so before top-p; 0 elsewhere.
        drawn_log_probs: [n, s] fp32, the same under the distribution that the token was drawn from, after top-k, top-p
            and min-p.
    """

    tokens: Tensor
    response_mask: Tensor
    truncated: Tensor
    texts: list[str]
    log_probs: Tensor
    drawn_log_probs: Tensor


def check_prompts(prompts: Sequence[Sequence[int]], *, longest: int) -> None:
    """Raise ValueError for a prompt that is empty or has more than ``longest`` tokens."""
    for index, prompt in enumerate(prompts):
        if not 0 < len(prompt) <= longest:
            raise ValueError(
                f"prompt {index} has {len(prompt)} tokens; rollout.max_prompt_tokens={longest} allows 1 to "
                f"{longest}: raise rollout.max_prompt_tokens or choose a task with such prompts"
            )


def decoded(rows: Sequence[Sequence[int]], *, ends: Collection[int], tokenizer: Any) -> list[str]:
    """The text of responses, without special tokens and without the token of ``ends`` that ended one, which need not be
    special."""
    kept = [row[:-1] if row and row[-1] in ends else row for row in rows]
    return tokenizer.batch_decode(kept, skip_special_tokens=True) if kept else []  # some versions answer [""]


class RolloutEngine(Protocol):
    """Draws responses under the actor's weights, and sleeps while others are at work.

    Attributes:
        name: ``engine``, for those who decide on its sleep.
        has_own_weights: it samples from a copy, which :meth:`sync` brings up to date before a rollout, and the actor
            sleeps in the rollout. Otherwise it computes with the actor's own parameters and :meth:`awake` wakes these.
    """

    name: str
    has_own_weights: bool

    def sync(self, actor: Role) -> None:
        """Wake up with a copy of the actor's weights; the actor is asleep before and after. Nothing to do for an engine
        without weights of its own."""
        ...

    def awake(self) -> AbstractContextManager[None]:
        """:meth:`generate` works inside; after it, the engine is asleep unless a schedule lets it stay awake for now,
        and what it holds is lost either way."""
        ...

    def generate(
        self, prompts: list[list[int]], *, seed: int, numbers: Sequence[int] | None = None, greedy: bool = False
    ) -> Responses:
        """One response per prompt; no prompts, no responses. Equal weights, prompts, numbers and seed give equal
        responses, whatever ran before. Communicators may be gone meanwhile (see :mod:`patches.reloadable_groups`)
        where the engine needs none.

        Args:
            numbers: of the responses among those of all ranks, so that each has draws of its own; None: 0 to n - 1.
            greedy: take the most probable token instead (log-probs stay those under the temperature).
        """
        ...

    def is_asleep(self, kind: str = "") -> bool:
        """Whether its memory is released; it has no kinds."""
        ...

    def sleep(self) -> None:
        """Release what the engine holds; its bytes are lost. An engine that is asleep stays so."""
        ...

    def close(self) -> None:
        """Give back what outlives a sleep. The engine is of no use afterwards."""
        ...
