"""Rollouts with a transformers model in the training process: batched decoding with a KV cache.

Simplified: static batches, so a row that has ended is computed until the last one ends.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, GenerationConfig, LogitsProcessor
from transformers.initialization import no_init_weights

from patches.reloadable_groups import destroyed as process_groups_destroyed
from trainer.common.multiples import LENGTH_MULTIPLE, round_up
from trainer.common.seeds import seed_for
from trainer.config.schema import ModelConfig, RolloutConfig
from trainer.memory.regions import MemoryObserver
from trainer.memory.saver import Saver
from trainer.models.generation import end_token_ids, vocabulary_settings
from trainer.models.hf_bridge import hf_config, views_by_file_name
from trainer.rollout.base import Responses, decoded
from trainer.rollout.native.sampling import Sampling, kept_probabilities
from trainer.rollout.own_weights import OwnWeights
from trainer.rollout.stops import StopStrings
from trainer.tasks.tokenizer import vocabulary_size

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

_TAG = "engine/weights"


class HfEngine(OwnWeights):
    """A :class:`trainer.rollout.base.RolloutEngine`. Ids beyond the tokenizer's largest are never drawn.

    Rows that other ranks draw have other numbers, so a call's draws are those of its first number.

    A new engine occupies its memory but holds no weights: put it to sleep, or :meth:`wake_up` to load some.
    """

    def __init__(
        self,
        model: ModelConfig,
        rollout: RolloutConfig,
        *,
        tokenizer: PreTrainedTokenizerFast,
        saver: Saver,
        observer: MemoryObserver,
    ) -> None:
        super().__init__(model, [_TAG], saver=saver, observer=observer)
        self._rollout, self._tokenizer = rollout, tokenizer
        self._ends = end_token_ids(model, tokenizer)
        self._pad: int = tokenizer.pad_token_id  # type: ignore[assignment]
        self._stop_strings = StopStrings(rollout.stop, tokenizer)
        self._vocab_size = vocabulary_size(tokenizer)
        config = hf_config(model, **vocabulary_settings(model, tokenizer))
        with no_init_weights():
            self.model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
        self.model.tie_weights()  # left out along with the initialisation
        self.model.eval().requires_grad_(False)
        self._host_copies = [
            (tensor, tensor.detach().clone()) for tensor in _tensors(self.model) if not isinstance(tensor, nn.Parameter)
        ]
        with saver.region(_TAG, backup=False):
            for tensor in _tensors(self.model):
                tensor.data = torch.empty_like(tensor, device=torch.cuda.current_device())

    def _load(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        parameters = views_by_file_name(dict(self.model.named_parameters()), model=self._architecture)
        for name, weight in weights:
            if weight.shape != parameters[name].shape:
                raise ValueError(
                    f"{name} has the shape {tuple(weight.shape)}, the engine's {tuple(parameters[name].shape)}: "
                    "the actor needs the engine's architecture and vocabulary"
                )
            parameters[name].copy_(weight)

    # ---- generation --------------------------------------------------------------------------------------------

    def generate(
        self, prompts: list[list[int]], *, seed: int, numbers: Sequence[int] | None = None, greedy: bool = False
    ) -> Responses:
        """One response to each of n prompts (token ids), as :class:`~trainer.rollout.base.RolloutEngine` says; the
        global generators stay where they are.

        Raises:
            RuntimeError: no weights are loaded (asleep, or never woken).
            ValueError: a prompt is empty or longer than ``rollout.max_prompt_tokens``.
        """
        self._check_ready(prompts, longest=self._rollout.max_prompt_tokens)
        device, pad = self.model.device, self._pad
        if not prompts:
            with process_groups_destroyed():  # as on the ranks that have some
                pass
            nothing = torch.zeros(0, 0, device=device)
            return Responses(nothing.long(), nothing.bool(), nothing.any(dim=1), [], nothing, nothing)
        width = max(map(len, prompts))
        padding = torch.tensor([width - len(prompt) for prompt in prompts]).to(device)
        padded = torch.tensor([[pad] * (width - len(prompt)) + prompt for prompt in prompts]).to(device)
        is_prompt = torch.arange(width, device=device) >= padding[:, None]
        seed = seed_for(seed, "rows", rank=numbers[0] if numbers else 0)
        with process_groups_destroyed():
            sequences, recorded = self._sample(padded, is_prompt, seed=seed, greedy=greedy)

        drawn = sequences[:, width:]
        ended = torch.isin(drawn, torch.tensor(self._ends, device=device)).cumsum(dim=1) > 0
        lengths, is_stopped = ended.logical_not().sum(dim=1) + ended[:, -1], ended[:, -1]
        if self._stop_strings:
            at_stop = self._stop_strings.lengths(drawn.tolist(), lengths.tolist()).to(device)
            lengths, is_stopped = at_stop.where(at_stop > 0, lengths), is_stopped | (at_stop > 0)
        limit = self._rollout.max_prompt_tokens + self._rollout.max_new_tokens
        longest = int((width - padding + lengths).max())
        columns = min(round_up(longest, LENGTH_MULTIPLE), limit)
        # source[i, t]: where the token of column t lies in the left-padded sequences, past their end for padding.
        source = torch.arange(columns, device=device) + padding[:, None]
        response_mask = (source >= width) & (source < width + lengths[:, None])
        tokens = sequences.gather(1, source.clamp(max=sequences.shape[1] - 1))
        place = (source - width).clamp(0, drawn.shape[1] - 1)
        log_probs, drawn_log_probs = (
            numbers.gather(1, place).where(response_mask, 0.0) for numbers in recorded.unbind(dim=-1)
        )
        return Responses(
            tokens=tokens.where(response_mask | (source < width), pad),
            response_mask=response_mask,
            truncated=~is_stopped,
            texts=decoded(
                [row[:length] for row, length in zip(drawn.tolist(), lengths.tolist(), strict=True)],
                ends=self._ends,
                tokenizer=self._tokenizer,
            ),
            log_probs=log_probs,
            drawn_log_probs=drawn_log_probs,
        )

    def _sample(self, prompts: Tensor, is_prompt: Tensor, *, seed: int, greedy: bool) -> tuple[Tensor, Tensor]:
        """prompts and is_prompt [n, w], padded on the left -> (sequences [n, w + drawn], their drawn tokens' log-probs
        [n, drawn, 2], plain and under what is left after top-k, top-p and min-p). A row is drawn until an
        end-of-sequence token, then padded."""
        rollout = self._rollout
        sampling = {"temperature": rollout.temperature, "top_p": rollout.top_p, "top_k": rollout.top_k}
        sampling |= {"min_p": rollout.min_p} if rollout.min_p else {}
        settings = GenerationConfig(
            do_sample=not greedy,
            max_new_tokens=rollout.max_new_tokens,
            eos_token_id=list(self._ends),
            pad_token_id=self._pad,
            **({} if greedy else sampling),
        )
        how = Sampling(rollout.temperature, rollout.top_k, rollout.top_p, rollout.min_p, greedy)
        recorder = _LogProbRecorder(how, vocab_size=self._vocab_size)
        devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
        with torch.random.fork_rng(devices=devices):
            torch.manual_seed(seed)
            sequences = self.model.generate(
                prompts,
                attention_mask=is_prompt.long(),
                generation_config=settings,
                logits_processor=[recorder],
            )
        assert isinstance(sequences, Tensor)
        return sequences, recorder.log_probs_of(sequences)


class _LogProbRecorder(LogitsProcessor):
    """Keeps the log-probs of each drawn token, plain and as drawn (see :class:`trainer.rollout.native.sampling.Drawn`),
    without keeping the logits of every step, and leaves padding of the vocabulary without probability.

    ``generate`` calls it with the tokens so far and the next one's raw logits, before temperature and top-p.
    """

    def __init__(self, sampling: Sampling, *, vocab_size: int) -> None:
        self._sampling, self._vocab_size = sampling, vocab_size
        self._next: Tensor | None = None
        self._drawn_from: Tensor | None = None
        self._drawn: list[Tensor] = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """input_ids [n, length], scores [n, v] -> scores."""
        self._record_last(input_ids)
        if scores.shape[1] > self._vocab_size:
            scores = scores.clone()
            scores[:, self._vocab_size :] = -torch.inf
        self._next = (scores.float() / self._sampling.temperature).log_softmax(dim=-1)
        kept = kept_probabilities(self._next.exp(), self._sampling)
        self._drawn_from = (kept / kept.sum(dim=-1, keepdim=True)).log()
        return scores

    def _record_last(self, input_ids: Tensor) -> None:
        if self._next is not None and self._drawn_from is not None:
            last = input_ids[:, -1:]
            plain, drawn = self._next.gather(1, last), self._drawn_from.gather(1, last)
            self._drawn.append(torch.stack([plain, torch.zeros_like(drawn) if self._sampling.greedy else drawn], -1))

    def log_probs_of(self, sequences: Tensor) -> Tensor:
        """Of the finished sequences, [n, drawn, 2]."""
        self._record_last(sequences)
        return torch.cat(self._drawn, dim=1)


def _tensors(model: nn.Module) -> Iterator[Tensor]:
    """Parameters, buffers, and tensors kept as plain attributes, each once."""
    found: dict[int, Tensor] = {}
    for module in model.modules():
        for attributes in (module._parameters, module._buffers, vars(module)):
            found.update((id(value), value) for value in attributes.values() if isinstance(value, Tensor))
    yield from found.values()
