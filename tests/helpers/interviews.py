"""An environment whose every answer is known beforehand, and an engine whose every response is."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import torch

from trainer.rollout.base import Responses
from trainer.tasks import Environment, Example, Reply, ToolResult


@dataclass(frozen=True)
class Interview(Environment):
    """Asks the n-th example n questions in all, whatever is said; pays 1 for the first response, 2, 4 ... for others.

    It says that a tool was called at every response, which takes too long at the second one.
    """

    max_turns: int
    train = property(lambda self: tuple(Example(f"q{n}", "a", {"questions": n}) for n in range(1, 9)))
    heldout = property(lambda self: self.train)

    def answer(self, responses: Sequence[str], example: Example) -> Reply:
        turn = len(responses)
        call = ToolResult("", "timed_out" if turn == 2 else "ok")
        return Reply(2.0 ** (turn - 1), f"+{turn}" if turn < example.metadata["questions"] else None, (call,))

    def demonstration(self, example: Example) -> list[str]:
        return ["a"] * example.metadata["questions"]

    def validate(self) -> None: ...


class ScriptedEngine:
    """Draws the rows of ``script`` (tokens), call by call; ``calls`` has what it was asked."""

    def __init__(self, script, tokenizer, *, truncated=()):
        self.script, self.calls, self._tokenizer, self._truncated = iter(script), [], tokenizer, truncated

    def awake(self):
        return nullcontext()

    def generate(self, prompts, *, seed, numbers=None, greedy=False):
        self.calls.append({"prompts": [list(prompt) for prompt in prompts], "seed": seed, "numbers": numbers})
        drawn = next(self.script)
        assert len(drawn) == len(prompts)
        columns = max(map(len, map(list.__add__, self.calls[-1]["prompts"], drawn)), default=0)
        tokens = torch.full((len(drawn), columns), self._tokenizer.pad_token_id)
        mask, log_probs = torch.zeros(len(drawn), columns, dtype=torch.bool), torch.zeros(len(drawn), columns)
        for row, (prompt, response) in enumerate(zip(prompts, drawn, strict=True)):
            end = len(prompt) + len(response)
            tokens[row, :end] = torch.tensor([*prompt, *response])
            mask[row, len(prompt) : end] = True
            log_probs[row, len(prompt) : end] = -torch.arange(1.0, len(response) + 1) - 10 * len(self.calls)
        return Responses(
            tokens=tokens,
            response_mask=mask,
            truncated=torch.tensor([response[-1] in self._truncated for response in drawn], dtype=torch.bool),
            texts=self._tokenizer.batch_decode(drawn, skip_special_tokens=True),
            log_probs=log_probs,
            drawn_log_probs=(log_probs - 0.5).where(mask, 0.0),
        )
