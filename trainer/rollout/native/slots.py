"""The device memory of the engine and the steps that change it: slots, in each of which one response is decoded.

Everything here lies in one saver region. A sleep loses all of it; :meth:`Slots.reset` fills in what must be there.
A step reads and writes only these tensors, so that a CUDA graph of it can be replayed. n rows in a step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, distributed

from trainer.megatron.groups import pipeline_group
from trainer.rollout.native.attention import Prompts, Rows
from trainer.rollout.native.cache import KvCache
from trainer.rollout.native.decoder import Decoder, Pass
from trainer.rollout.native.pieces import COLUMN, TOKEN, Pieces
from trainer.rollout.native.sampling import Drawn, Sampling, uniforms

_SCRATCH_PAGE = 0


@dataclass(frozen=True)
class Entry:
    """A row that enters: the ``slot`` it gets, ``number`` of the response (for its draws) and ``limit`` of its tokens,
    ``prompt`` of the pass, ``pages``."""

    slot: int
    number: int
    limit: int
    prompt: int
    pages: list[int]


class Slots:
    """``cache.rows`` slots, and one more for rows that only fill up a batch."""

    def __init__(
        self,
        cache: KvCache,
        decoder: Decoder,
        *,
        pieces: Pieces,
        kv_shape: tuple[int, int],
        is_stop: Tensor,
        is_fixed: bool,
    ) -> None:
        """Build it inside the region.

        Args:
            kv_shape: key-value heads of this rank, and elements of one.
            is_stop: [vocab_size] bool, tokens that end a response; it does not sleep.
            is_fixed: no shape depends on which rows there are, and so no bit of a row on the others.
        """
        slots, device = cache.rows + 1, torch.cuda.current_device()
        self._cache_plan, self._decoder, self._pieces = cache, decoder, pieces
        self._is_fixed, self.spare = is_fixed, cache.rows
        self.state = torch.zeros(slots, 5, dtype=torch.int64, device=device)
        self.pages = torch.zeros(slots, cache.pages_per_row, dtype=torch.int32, device=device)
        self.batch = torch.zeros(slots, dtype=torch.int64, device=device)  # the rows of a step, see decode
        self._uniforms = torch.zeros(slots, cache.response_tokens, device=device)
        # One column more than there are tokens takes what finished rows would write.
        self.tokens = torch.zeros(slots, cache.response_tokens + 1, dtype=torch.int64, device=device)
        self.log_probs = torch.zeros(slots, cache.response_tokens + 1, 2, device=device)  # plain, drawn from
        self._is_stop = is_stop
        self._rotary = torch.zeros(2, cache.row_tokens, 1, 1, kv_shape[1], dtype=decoder.dtype, device=device)
        shape = (decoder.layer_count, cache.pages, cache.page_tokens, kv_shape[0], 2, kv_shape[1])
        self._cache = torch.zeros(shape, dtype=decoder.dtype, device=device)

    def reset(self) -> None:
        """Fill in what every rollout finds there, after a wake-up that left anything in memory."""
        for tensor in (self.state, self.pages, self.batch, self.tokens, self.log_probs, self._uniforms):
            tensor.zero_()
        self._cache.zero_()  # a value that no row has yet is multiplied by a weight of zero: it must not be NaN
        self._rotary.copy_(self._decoder.rotary_table(self._cache_plan.row_tokens))

    # ---- prompts ---------------------------------------------------------------------------------------------------

    def enter(
        self, prompts: Sequence[Sequence[int]], entries: Sequence[Entry], *, seed: int, sampling: Sampling, pad_to: int
    ) -> None:
        """Compute prompts, each of them once, and draw the first token of every row that begins with one.

        Args:
            pad_to: tokens of the pass; those beyond the prompts' are of no use to anybody.
        """
        device = self.state.device
        first_of = {entry.prompt: entry for entry in reversed(entries)}
        first = [first_of[number] for number in range(len(prompts))]
        lengths = [len(prompt) for prompt in prompts]
        tokens = torch.tensor([token for prompt in prompts for token in prompt], dtype=torch.int64)
        hidden = self._pass_over(tokens, lengths, [entry.pages for entry in first], pad_to=pad_to)
        if not entries:
            return
        self._copy_last_pages(entries, first, lengths)
        slots = torch.tensor([entry.slot for entry in entries]).to(device)
        state = torch.tensor([[0, lengths[entry.prompt] - 1, 0, entry.limit, 1] for entry in entries])
        state = state.to(device)
        self.state[slots] = state
        self.pages[slots] = self._page_table([entry.pages for entry in entries]).to(device)
        numbers = torch.tensor([entry.number for entry in entries]).to(device)
        self._uniforms[slots] = uniforms(seed, numbers, columns=self._cache_plan.response_tokens)
        last = torch.tensor(lengths).cumsum(0) - 1
        if self._is_fixed:
            last = torch.cat([last, last.new_zeros(self._cache_plan.rows - len(last))])
        of_entry = torch.tensor([entry.prompt for entry in entries])
        self._draw(slots, state, hidden, sampling, last=last.to(device), of_row=of_entry.to(device))

    def _pass_over(self, tokens: Tensor, lengths: Sequence[int], pages: list[list[int]], *, pad_to: int) -> Tensor:
        """Hidden states of the packed prompts, whose keys and values go to ``pages``."""
        device, page_tokens = self.state.device, self._cache_plan.page_tokens
        extra = pad_to - len(tokens)
        tokens = torch.cat([tokens, tokens.new_zeros(extra)]).to(device)
        starts = torch.tensor([0, *lengths], dtype=torch.int64).cumsum(0)
        prompt = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths, dtype=torch.int64))
        position = torch.arange(len(prompt)) - starts[prompt]
        page = self._page_table(pages).long()[prompt, position // page_tokens]
        places = torch.cat([page * page_tokens + position % page_tokens, position.new_zeros(extra)]).to(device)
        position = torch.cat([position, position.new_zeros(extra)]).to(device)
        return self._decoder.hidden(
            tokens,
            Pass(
                cos=self._rotary[0][position],
                sin=self._rotary[1][position],
                places=places,
                attends_to=Prompts(starts.int().to(device), self._longest_of(lengths), int(starts[-1])),
                has_fixed_shapes=self._is_fixed,
            ),
            self._cache,
        )

    def _longest_of(self, lengths: Sequence[int]) -> int:
        """Columns of the prompts where they are padded."""
        if self._is_fixed:
            return self._cache_plan.row_tokens - self._cache_plan.response_tokens
        return max(lengths, default=0)

    def _page_table(self, pages: list[list[int]]) -> Tensor:
        """[rows, pages per row] int32, on the host."""
        width = self._cache_plan.pages_per_row
        rows = [row + [_SCRATCH_PAGE] * (width - len(row)) for row in pages]
        return torch.tensor(rows, dtype=torch.int32).view(-1, width)

    def _copy_last_pages(self, entries: Sequence[Entry], first: Sequence[Entry], lengths: Sequence[int]) -> None:
        """Rows share the full pages of their prompt. The page in which it ends they fill with tokens of their own, so
        each gets a copy."""
        page_tokens, copies, longest = self._cache_plan.page_tokens, [], 0
        for entry in entries:
            full, rest = divmod(lengths[entry.prompt], page_tokens)
            if rest and entry is not first[entry.prompt]:
                copies.append((first[entry.prompt].pages[full], entry.pages[full]))
                longest = max(longest, rest)
        if copies:
            source, target = torch.tensor(copies).T.to(self.state.device)
            for layer in self._cache:
                layer[target, :longest] = layer[source, :longest]

    # ---- steps -----------------------------------------------------------------------------------------------------

    def decode(self, rows: int, *, sampling: Sampling, longest: int, has_fixed_shapes: bool) -> None:
        """One more token for the first ``rows`` slots in ``batch``; finished ones stay as they are.

        Args:
            longest: no row has more keys than this, its new token included.
        """
        slots = self.batch[:rows]
        own, pages, places, cos, sin, keys = self._pieces.begin(
            slots, self.state, self.pages, self._rotary, self._cache_plan.page_tokens
        )
        step = Pass(cos, sin, places, Rows(pages, keys, longest), has_fixed_shapes)
        hidden = self._decoder.hidden(own[:, TOKEN], step, self._cache)
        self._draw(slots, own, hidden, sampling)

    def _draw(
        self,
        slots: Tensor,
        own: Tensor,
        hidden: Tensor,
        sampling: Sampling,
        *,
        last: Tensor | None = None,
        of_row: Tensor | None = None,
    ) -> None:
        """Draw a token for each row, whose state is ``own`` [n, 5], and take note of it.

        Args:
            last: [prompts], which of the hidden states matter; None: one for each row.
            of_row: [n], which of these is a row's.
        """
        drawn = None
        if self._decoder.is_last:
            logits = self._decoder.logits(hidden if last is None else hidden[last])
            # Rows of one prompt share its logits; without such rows there is nothing to copy.
            if of_row is not None and len(of_row) != len(logits):
                logits = logits[of_row]
            uniform = self._uniforms[slots, own[:, COLUMN].clamp(max=self._uniforms.shape[1] - 1)]
            drawn = self._pieces.draw(logits, uniform, sampling)
        drawn = _of_last_stage(drawn, rows=len(slots), device=own.device)
        self._pieces.note(slots, own, drawn, self.state, self.tokens, self.log_probs, self._is_stop)


def _of_last_stage(drawn: Drawn | None, *, rows: int, device: torch.device) -> Drawn:
    """What the last pipeline stage has drawn, on all of them."""
    group = pipeline_group()
    if group.size() == 1:
        assert drawn is not None
        return drawn
    tokens = torch.empty(rows, dtype=torch.int64, device=device) if drawn is None else drawn.tokens
    log_probs = (
        torch.empty(2, rows, device=device) if drawn is None else torch.stack([drawn.log_probs, drawn.drawn_log_probs])
    )
    for tensor in (tokens, log_probs):
        distributed.broadcast(tensor, group=group, group_src=group.size() - 1)
    return Drawn(tokens, log_probs[0], log_probs[1])
