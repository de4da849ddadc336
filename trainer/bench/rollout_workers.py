"""The workers' side of the rollout benchmark: one actor, and the engines that sample from it or from its weights."""

from __future__ import annotations

import dataclasses
import faulthandler
import gc
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch

from trainer.bench.measure import versions
from trainer.bench.rollout_config import BenchRolloutConfig
from trainer.config.schema import Config, RolloutConfig
from trainer.megatron import platform
from trainer.memory.ledger import sample_memory
from trainer.plan import make_plan
from trainer.rollout.native.cache import MOST_ROWS, KvCache, cache_of, page_tokens

EOS = 1


@dataclass(frozen=True)
class RolloutJob:
    """What the parent hands to a worker: the cases that it measures, one after the other."""

    config: Config
    bench: BenchRolloutConfig
    cases: tuple[str, ...]


def run_cases(job: RolloutJob) -> dict[str, Any]:
    """Case -> what was measured (or its error), and facts about the device and the model."""
    faulthandler.dump_traceback_later(job.bench.case_timeout_seconds, exit=True)
    platform.set_up(job.config)
    platform.set_up_process_groups(job.config)
    bench = _Bench(job)
    results: dict[str, Any] = {}
    for name in job.cases:
        try:
            results[name] = getattr(bench, name)()
        except Exception as error:  # the others go on
            faulthandler.dump_traceback()
            results[name] = {"error": f"{type(error).__name__}: {error}"[:500]}
        print(name, results[name], flush=True)
        gc.collect()
        if bench.is_gpu:
            torch.cuda.empty_cache()
    facts = {"parameters": bench.parameters, "bandwidth": bench.bandwidth, "floor_seconds": bench.floor_seconds}
    return {"cases": results, **facts, "platform": platform.describe(job.config), "versions": versions()}


class _Bench:
    """An awake actor of random weights; each method is a case."""

    def __init__(self, job: RolloutJob) -> None:
        from trainer.memory.arena import HostArenas
        from trainer.memory.saver import make_saver
        from trainer.roles.role import FORWARD, Role

        self._job, self._bench, self._kinds = job, job.bench, FORWARD
        config = job.config
        self.is_gpu = config.platform.name == "cuda"
        self._saver = make_saver(config)
        self._model = config.roles["actor"].model
        self._actor = Role(
            "actor",
            config,
            plan=make_plan(config),
            saver=self._saver,
            vocab_size=job.bench.vocab_size,
            seed=config.seed,
            observer=lambda event: None,
            arenas=HostArenas.of(config),
        )
        self.parameters = self._actor.model.parameter_count()
        self.bandwidth = _copy_bandwidth(2**31 if self.is_gpu else 2**26)
        self.floor_seconds = self._floor(job.bench.prompts, job.bench.new_tokens)

    def _floor(self, prompts: int, tokens: int) -> float:
        """Seconds to read, for each new token, all weights but the embedding, and the keys and values of all rows."""
        model, bench = self._model, self._bench
        item = 2 if model.dtype == "bf16" else 4
        weights = item * (self.parameters - bench.vocab_size * model.hidden_size)
        token = 2 * item * model.layers * model.kv_heads * model.head_dim
        keys = sum(prompts * (bench.prompt_tokens + step) * token for step in range(tokens))
        return (tokens * weights + keys) / self.bandwidth

    def _prompts(self, count: int) -> list[list[int]]:
        generator = torch.Generator().manual_seed(count)
        shape = (count, self._bench.prompt_tokens)
        return torch.randint(EOS + 1, self._bench.vocab_size, shape, generator=generator).tolist()

    def _rollout(self, new_tokens: int, **changes: Any) -> RolloutConfig:
        given = self._job.config.rollout
        return dataclasses.replace(
            given, max_prompt_tokens=self._bench.prompt_tokens, max_new_tokens=new_tokens, **changes
        )

    def _cache(self, rows: int, new_tokens: int) -> KvCache:
        row_tokens = self._bench.prompt_tokens + new_tokens
        size = page_tokens(cuda=self.is_gpu, dtype=self._model.dtype, row_tokens=row_tokens)
        return cache_of(
            self._model,
            row_tokens=row_tokens,
            response_tokens=new_tokens,
            rows=min(rows, MOST_ROWS),
            page_tokens=size,
        )

    def _native(self, rows: int, new_tokens: int, **changes: Any) -> Any:
        from trainer.rollout.native.engine import NativeEngine

        engine = NativeEngine(
            self._actor,
            self._model,
            self._rollout(new_tokens, **changes),
            cache=self._cache(rows, new_tokens),
            tokenizer=Ids(self._bench.vocab_size),  # type: ignore[arg-type]
            saver=self._saver,
            observer=lambda event: None,
        )
        engine.wake_up()
        return engine

    # ---- cases -----------------------------------------------------------------------------------------------------

    def native(self, **changes: Any) -> dict[str, Any]:
        bench = self._bench
        engine = self._native(bench.prompts, bench.new_tokens, **changes)
        prompts = self._prompts(bench.prompts)
        result = self._timed(lambda: int(engine.generate(prompts, seed=1).response_mask.sum()))
        limits = [1] * len(prompts)
        first = self._timed(lambda: int(engine.generate(prompts, seed=1, limits=limits).response_mask.sum()))
        return {**result, "prompt_seconds": first["seconds"]}

    def compiled(self) -> dict[str, Any]:
        return self.native(compile=True)

    def hf(self) -> dict[str, Any]:
        from trainer.memory.saver import NullSaver
        from trainer.models.hf_bridge import to_hf
        from trainer.rollout.hf import HfEngine

        bench = self._bench
        engine = HfEngine(
            self._model,
            self._rollout(bench.new_tokens),
            tokenizer=Ids(bench.vocab_size),  # type: ignore[arg-type]
            saver=NullSaver(),
            observer=lambda event: None,
        )
        engine.wake_up(to_hf(self._actor.whole_weights(), model=self._model))
        prompts = self._prompts(bench.prompts)
        return self._timed(lambda: int(engine.generate(prompts, seed=1).response_mask.sum()), repeats=1)

    def generate(self) -> dict[str, Any]:
        """transformers by itself: nothing but tokens are asked for, and nobody ends early."""
        from transformers import AutoModelForCausalLM, GenerationConfig

        from trainer.models.hf_bridge import hf_config

        bench, device = self._bench, torch.cuda.current_device()
        config = hf_config(self._model, vocab_size=bench.vocab_size, bos_token_id=2, eos_token_id=EOS, pad_token_id=0)
        model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").eval().to(device)
        ids = torch.tensor(self._prompts(bench.prompts)).to(device)
        new = bench.new_tokens
        settings = GenerationConfig(
            do_sample=True, top_k=0, max_new_tokens=new, min_new_tokens=new, eos_token_id=EOS, pad_token_id=0
        )

        def call() -> int:
            out = model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=settings)
            return out.numel() - ids.numel()

        with torch.no_grad():
            return self._timed(call, repeats=1)

    def ragged(self) -> dict[str, Any]:
        """As many prompts as ``many``, as many rows at once as the full batch."""
        return self._ragged(self._bench.prompts)

    def many(self) -> dict[str, Any]:
        return self._ragged(self._bench.many_prompts)

    def _ragged(self, rows: int) -> dict[str, Any]:
        bench = self._bench
        engine = self._native(rows, bench.most_tokens)
        uniform = torch.rand(bench.many_prompts, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        lengths = (uniform.log() / torch.tensor(1 - 1 / bench.mean_tokens, dtype=torch.float64).log()).ceil()
        limits = lengths.clamp(1, bench.most_tokens).int().tolist()
        prompts = self._prompts(bench.many_prompts)
        return self._timed(lambda: int(engine.generate(prompts, seed=1, limits=limits).response_mask.sum()), repeats=1)

    def long(self) -> dict[str, Any]:
        bench = self._bench
        before = torch.cuda.memory_allocated() if self.is_gpu else 0
        engine = self._native(bench.long_prompts, bench.long_tokens)
        held = torch.cuda.memory_allocated() - before if self.is_gpu else 0
        planned = self._cache(bench.long_prompts, bench.long_tokens).size_bytes
        prompts = self._prompts(bench.long_prompts)
        result = self._timed(lambda: int(engine.generate(prompts, seed=1).response_mask.sum()), repeats=0)
        return {**result, "planned_bytes": planned, "held_bytes": held}

    def asleep(self) -> dict[str, Any]:
        """Seconds from everything asleep to the first tokens, beyond those of the actor's own wake-up; GPU memory that
        an engine leaves in use; whether a sleep (with poison) changed a bit."""
        bench, prompts = self._bench, self._prompts(self._bench.prompts)
        self._pass_over(prompts)  # what the actor's own passes leave behind is not the engine's
        self._actor.sleep()
        before = sample_memory()
        self._actor.wake_up(kinds=self._kinds)
        engine = self._native(bench.prompts, bench.new_tokens)
        first = [engine.generate(prompts, seed=1, greedy=greedy) for greedy in (False, True)]
        seconds: list[dict[str, float]] = []
        is_same = True
        for _ in range(1 + bench.repeats):
            engine.sleep()
            self._actor.sleep()
            asleep = sample_memory()
            start = _now()
            self._actor.wake_up(kinds=self._kinds)
            actor_awake = _now()
            engine.wake_up()
            engine_awake = _now()
            engine.generate(prompts, seed=1, limits=[1] * len(prompts))
            tokens = _now()
            seconds.append(
                {"actor": actor_awake - start, "engine": engine_awake - actor_awake, "first": tokens - engine_awake}
            )
            again = [engine.generate(prompts, seed=1, greedy=greedy) for greedy in (False, True)]
            is_same &= all(
                torch.equal(getattr(one, field), getattr(other, field))
                for one, other in zip(first, again, strict=True)
                for field in ("tokens", "log_probs", "drawn_log_probs")
            )
        return {"cycles": seconds, "bits_kept": is_same, "memory_before": before, "memory_asleep": asleep}

    def _pass_over(self, prompts: list[list[int]]) -> None:
        tokens = torch.tensor(prompts).to(torch.cuda.current_device())
        with torch.no_grad():
            self._actor.model.gpts()[0](
                tokens, torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens), None
            )

    def _timed(self, call: Callable[[], int], *, repeats: int | None = None) -> dict[str, Any]:
        """``call`` returns the tokens that it drew."""
        start = _now()
        tokens = call()
        first = best = _now() - start
        for _ in range(self._bench.repeats if repeats is None else repeats):
            start = _now()
            tokens = call()
            best = min(best, _now() - start)
        return {"seconds": best, "first_seconds": first, "tokens": tokens}


class Ids(SimpleNamespace):
    """What an engine asks of a tokenizer, of one whose tokens have no text; decoding is left out of the times."""

    def __init__(self, entries: int) -> None:
        super().__init__(eos_token_id=EOS, pad_token_id=0, bos_token_id=2)
        self._entries = entries

    def get_vocab(self) -> dict[str, int]:
        return {str(number): number for number in range(self._entries)}

    def batch_decode(self, rows: list[list[int]], **_: Any) -> list[str]:
        return [""] * len(rows)


def _now() -> float:
    torch.cuda.synchronize()
    return time.perf_counter()


def _copy_bandwidth(size: int) -> float:
    """Bytes per second that a copy on the device reads and writes."""
    source = torch.ones(size, dtype=torch.uint8, device=torch.cuda.current_device())
    target = torch.empty_like(source)
    target.copy_(source)
    start = _now()
    for _ in range(10):
        target.copy_(source)
    return 10 * 2 * size / (_now() - start)
