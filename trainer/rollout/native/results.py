"""From what each slot drew to the tensors of :class:`trainer.rollout.base.Responses`."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor

from trainer.common.multiples import LENGTH_MULTIPLE, round_up
from trainer.rollout.base import Responses, decoded


class Results:
    """The responses of one call, filled row by row. n of them, with c tokens at most."""

    def __init__(self, n: int, *, columns: int, device: torch.device) -> None:
        self.tokens = torch.zeros(n, columns, dtype=torch.int64, device=device)
        self.log_probs = torch.zeros(n, columns, 2, device=device)
        self._lengths = torch.zeros(n, dtype=torch.int64)
        self._stopped = torch.zeros(n, dtype=torch.bool)

    def put(self, rows: Tensor, *, tokens: Tensor, log_probs: Tensor, lengths: Tensor, stopped: Tensor) -> None:
        """Of the responses ``rows`` [m]: tokens [m, c], log_probs [m, c, 2] (plain, drawn from), lengths [m], and
        whether something other than the limit ended them [m]."""
        on_device = rows.to(self.tokens.device)
        self.tokens[on_device], self.log_probs[on_device] = tokens, log_probs
        self._lengths[rows], self._stopped[rows] = lengths, stopped

    def check_finite(self, prompts: Sequence[Sequence[int]]) -> None:
        """Raises RuntimeError, naming the prompt, if a log-prob is NaN: so were the logits."""
        columns = torch.arange(self.tokens.shape[1], device=self.tokens.device)
        is_drawn = columns < self._lengths.to(self.tokens.device)[:, None]
        is_wrong = (self.log_probs.isnan().any(dim=-1) & is_drawn).any(dim=-1)
        if is_wrong.any():
            row = int(is_wrong.int().argmax())
            raise RuntimeError(
                f"the logits of response {row} are NaN (its prompt has the {len(prompts[row])} token ids "
                f"{list(prompts[row])[:8]}...); so {int(is_wrong.sum())} of {len(prompts)} responses: the actor's "
                "weights hold NaN or inf, or its activations overflow"
            )

    def responses(
        self, prompts: Sequence[Sequence[int]], *, pad: int, ends: Collection[int], limit: int, tokenizer: Any
    ) -> Responses:
        """Rows of prompt, response, padding; ``limit``: the most columns; ``ends``: tokens that end a response."""
        device = self.tokens.device
        prompt_lengths = torch.tensor([len(prompt) for prompt in prompts], dtype=torch.int64)
        longest = max((prompt_lengths + self._lengths).tolist(), default=0)
        columns = min(round_up(longest, LENGTH_MULTIPLE), limit)
        tokens = torch.full((len(prompts), columns), pad)
        position = torch.arange(columns)
        is_prompt = position < prompt_lengths[:, None]
        tokens[is_prompt] = torch.tensor([token for prompt in prompts for token in prompt], dtype=torch.int64)
        column = position - prompt_lengths[:, None]
        is_response = (~is_prompt & (column < self._lengths[:, None])).to(device)
        source = column.clamp(0, self.tokens.shape[1] - 1).to(device)
        drawn = self.tokens.gather(1, source)
        log_probs = self.log_probs.gather(1, source[..., None].expand(-1, -1, 2)).where(is_response[..., None], 0.0)
        host_tokens = self.tokens.tolist()
        return Responses(
            tokens=drawn.where(is_response, tokens.to(device)),
            response_mask=is_response,
            truncated=(~self._stopped).to(device),
            texts=decoded(
                [row[:length] for row, length in zip(host_tokens, self._lengths.tolist(), strict=True)],
                ends=ends,
                tokenizer=tokenizer,
            ),
            log_probs=log_probs[..., 0].contiguous(),
            drawn_log_probs=log_probs[..., 1].contiguous(),
        )
