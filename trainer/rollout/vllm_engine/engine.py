"""``rollout=vllm``: vLLM in the training process, one whole model on every rank.

Weights lie in the saver region ``engine/weights``, keys and values in ``engine/kv``.

Simplified: dense models, and no rank shares a model with another.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import numpy
import torch
from torch import Tensor
from vllm import LLM, SamplingParams
from vllm.distributed import parallel_state
from vllm.model_executor.layers import rotary_embedding

import patches
from patches import vllm_memory
from trainer.config.schema import ModelConfig, RolloutConfig
from trainer.memory.regions import MemoryObserver
from trainer.memory.saver import Saver
from trainer.models.dtypes import DTYPES
from trainer.models.generation import end_token_ids, vocabulary_settings
from trainer.models.hf_bridge import hf_config
from trainer.rollout.base import Responses
from trainer.rollout.native.cache import KvCache
from trainer.rollout.native.results import Results
from trainer.rollout.native.sampling import Sampling, uniforms
from trainer.rollout.own_weights import OwnWeights
from trainer.rollout.stops import StopStrings
from trainer.rollout.vllm_engine.draws import ROW, Call, Draws
from trainer.tasks.tokenizer import vocabulary_size

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

REGIONS = {"weights": "engine/weights", "kv_cache": "engine/kv"}  # vLLM's tag -> ours


class VllmEngine(OwnWeights):
    """A :class:`trainer.rollout.base.RolloutEngine`. Ids beyond the tokenizer's largest are never drawn.

    A new engine occupies its memory but holds no weights: put it to sleep, or :meth:`wake_up` to load some.
    """

    def __init__(
        self,
        model: ModelConfig,
        rollout: RolloutConfig,
        *,
        cache: KvCache,
        tokenizer: PreTrainedTokenizerFast,
        saver: Saver,
        observer: MemoryObserver,
    ) -> None:
        super().__init__(model, list(REGIONS.values()), saver=saver, observer=observer)
        self._rollout, self._tokenizer = rollout, tokenizer
        self._ends, self._vocab_size = end_token_ids(model, tokenizer), vocabulary_size(tokenizer)
        self._stop_strings = StopStrings(rollout.stop, tokenizer)
        assert "vllm_memory" in patches.applied()
        with _process_left_alone(), vllm_memory.allocations_in(self._region), TemporaryDirectory() as folder:
            hf_config(model, **vocabulary_settings(model, tokenizer)).save_pretrained(folder)
            self._llm = LLM(
                model=folder,
                skip_tokenizer_init=True,
                load_format="dummy",
                generation_config="vllm",
                dtype=DTYPES[model.dtype],
                max_model_len=cache.row_tokens,
                max_num_seqs=cache.rows,
                block_size=cache.page_tokens,
                kv_cache_memory_bytes=cache.page_bytes,
                gpu_memory_utilization=0.01,  # of which vLLM asks only whether it is free
                enforce_eager=not rollout.compile,
                logits_processors=[Draws],
                async_scheduling=False,
                distributed_executor_backend="external_launcher",
                disable_log_stats=True,
                seed=0,
            )
        # At exit it would destroy the process groups of the process that it is in.
        self._llm.llm_engine.engine_core._finalizer.detach()
        self._runner: Any = self._llm.llm_engine.model_executor.driver_worker.worker.model_runner
        self.model = self._runner.model
        self._host_copies = [(tensor, tensor.detach().clone()) for tensor in self.model.buffers()]

    def _region(self, tag: str) -> AbstractContextManager[None]:
        return self._saver.region(REGIONS[tag], backup=False) if tag in REGIONS else nullcontext()

    def _load(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        for pages in self._runner.kv_caches:
            pages.zero_()  # masked keys count 0 times what lies there
        self.model.load_weights(weights)

    def close(self) -> None:
        """Forget what vLLM keeps for its process: groups, beside those of the training process, and rotary tables."""
        parallel_state.destroy_model_parallel()
        if parallel_state._WORLD is not None:
            parallel_state._WORLD.destroy()
        parallel_state._WORLD = None
        rotary_embedding._ROPE_DICT.clear()

    @torch.no_grad()
    def generate(
        self, prompts: list[list[int]], *, seed: int, numbers: Sequence[int] | None = None, greedy: bool = False
    ) -> Responses:
        """One response to each of n prompts (token ids), as :class:`~trainer.rollout.base.RolloutEngine` says; drawn as
        ``rollout=native`` draws.

        Raises:
            RuntimeError: no weights are loaded (asleep, or never woken), or they gave NaN.
            ValueError: a prompt is empty or longer than ``rollout.max_prompt_tokens``.
        """
        rollout, device = self._rollout, torch.device(torch.cuda.current_device())
        self._check_ready(prompts, longest=rollout.max_prompt_tokens)
        shape = (len(prompts), rollout.max_new_tokens)
        own_numbers = torch.tensor(range(len(prompts)) if numbers is None else numbers, dtype=torch.int64)
        call = Call(
            Sampling(rollout.temperature, rollout.top_k, rollout.top_p, rollout.min_p, greedy),
            uniforms=uniforms(seed, own_numbers.to(device), columns=rollout.max_new_tokens),
            tokens=torch.zeros(*shape, dtype=torch.int64, device=device),
            log_probs=torch.zeros(*shape, 2, device=device),
            vocab_size=self._vocab_size,
            stop_strings=self._stop_strings,
            end=self._ends[0],
        )
        results = self._results(call, self._drawn(call, prompts))
        results.check_finite(prompts)
        limit = rollout.max_prompt_tokens + rollout.max_new_tokens
        pad: int = self._tokenizer.pad_token_id  # type: ignore[assignment]
        return results.responses(prompts, pad=pad, ends=self._ends, limit=limit, tokenizer=self._tokenizer)

    def _drawn(self, call: Call, prompts: list[list[int]]) -> list[list[int]]:
        """The tokens of each response."""
        self._llm.reset_prefix_cache()  # what ran before must not decide how a prompt is computed
        inputs: Any = [{"prompt_token_ids": prompt} for prompt in prompts]
        Draws.call = call
        try:  # without prompts vLLM makes one up
            parameters = [self._parameters(row) for row in range(len(prompts))]
            outputs = self._llm.generate(inputs, parameters, use_tqdm=False) if prompts else []
        finally:
            Draws.call = None
        return [list(output.outputs[0].token_ids) for output in outputs]

    def _parameters(self, row: int) -> SamplingParams:
        return SamplingParams(
            temperature=0.0,  # takes the one token that Draws leaves
            max_tokens=self._rollout.max_new_tokens,
            stop_token_ids=list(self._ends),
            detokenize=False,
            extra_args={ROW: row},
        )

    def _results(self, call: Call, drawn: list[list[int]]) -> Results:
        """What ``call`` has found, how long each response is, and whether something ended it."""
        lengths = torch.tensor([len(row) for row in drawn], dtype=torch.int64)
        stopped = torch.tensor([row[-1] in self._ends for row in drawn], dtype=torch.bool)
        if self._stop_strings and drawn:
            at_stop = self._stop_strings.lengths(drawn, lengths.tolist())
            lengths, stopped = at_stop.where(at_stop > 0, lengths), stopped | (at_stop > 0)
        results = Results(len(drawn), columns=call.tokens.shape[1], device=call.tokens.device)
        rows = torch.arange(len(drawn))
        results.put(rows, tokens=call.tokens, log_probs=call.log_probs, lengths=lengths, stopped=stopped)
        return results


@contextmanager
def _process_left_alone() -> Iterator[None]:
    """vLLM seeds every generator, sets the number of threads and, on a CPU, forbids to set it again."""
    set_threads, threads = torch.set_num_threads, torch.get_num_threads()
    of_python, of_numpy = random.getstate(), numpy.random.get_state()
    with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
        try:
            yield
        finally:
            torch.set_num_threads = set_threads
            torch.set_num_threads(threads)
            random.setstate(of_python)
            numpy.random.set_state(of_numpy)
