"""The draws of ``rollout=vllm``: vLLM computes logits, and what is made of them is what ``rollout=native`` makes.

vLLM's own sampling knows log-probs from before or after top-p, not both, and no draws that are keyed by a response's
number. So a logits processor, which vLLM offers to everyone, draws the token and leaves vLLM no other choice.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessor, process_dict_updates

from trainer.rollout.native.sampling import Sampling, draw
from trainer.rollout.stops import StopStrings

ROW = "row"  # of a request, in the call that it is of: what its ``extra_args`` say


@dataclass(frozen=True)
class Call:
    """One call of the engine: n responses, c tokens each at most.

    Attributes:
        uniforms: [n, c].
        tokens: [n, c] int64, filled here.
        log_probs: [n, c, 2], plain and drawn from, filled here.
        vocab_size: entries of the tokenizer; the model may have more.
        end: the token that ends a response after a stop string.
    """

    sampling: Sampling
    uniforms: Tensor
    tokens: Tensor
    log_probs: Tensor
    vocab_size: int
    stop_strings: StopStrings
    end: int


class Draws(LogitsProcessor):
    """Draws one token for each row of a batch; all others then have no probability."""

    call: ClassVar[Call | None] = None

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
        self._rows: dict[int, tuple[int, list[int]]] = {}  # place in the batch -> row of the call, its tokens so far

    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        process_dict_updates(self._rows, batch_update, lambda params, _, drawn: (params.extra_args[ROW], drawn))

    def apply(self, logits: Tensor) -> Tensor:
        """logits [rows of the batch, v], changed in place."""
        call = Draws.call
        if call is None:  # vLLM tries what it will need
            return logits
        drawn = [self._rows[place] for place in range(len(logits))]
        rows, columns = torch.tensor([(row, len(tokens)) for row, tokens in drawn]).T.to(logits.device)
        found = draw(logits[:, : call.vocab_size], call.uniforms[rows, columns], call.sampling)
        tokens = found.tokens
        if call.stop_strings:
            has_stopped = [call.stop_strings.length_at_stop(of_row, checked=len(of_row) - 1) for _, of_row in drawn]
            tokens = tokens.where(torch.tensor([end is None for end in has_stopped]).to(tokens.device), call.end)
        call.tokens[rows, columns] = tokens
        call.log_probs[rows, columns] = torch.stack([found.log_probs, found.drawn_log_probs], dim=-1)
        return logits.fill_(-torch.inf).scatter_(1, tokens[:, None], 0.0)
