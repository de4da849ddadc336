"""``rollout=native``: continuous batching over the actor's own parameters.

The engine has no weights. It decodes with the actor's chunks, so the actor must be awake; what is its own, the keys and
values above all, lies in the saver region ``engine/kv``. Every sleep loses it: no rollout needs it from an earlier one.

Ranks that hold a model together make the same decisions, since they see the same tokens. Data- and context-parallel
ranks decode other rows each. Where experts are spread over
data-parallel ranks, these compute in step: as many rows and steps as the one that has most (:mod:`.lockstep`).
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING

import torch

from patches.reloadable_groups import destroyed as process_groups_destroyed
from trainer.config.schema import ModelConfig, RolloutConfig
from trainer.memory.regions import MemoryObserver
from trainer.memory.saver import Saver
from trainer.models.generation import end_token_ids
from trainer.plan.holdings import ENGINE
from trainer.roles.role import FORWARD, Role
from trainer.rollout import sleeping
from trainer.rollout.base import Responses, check_prompts
from trainer.rollout.native import attention
from trainer.rollout.native.cache import KvCache
from trainer.rollout.native.decoder import Decoder
from trainer.rollout.native.graphs import GRAPHS, Graphs, padded_rows
from trainer.rollout.native.lockstep import Lockstep
from trainer.rollout.native.pieces import ALIVE, COLUMN, PLAIN, compiled
from trainer.rollout.native.results import Results
from trainer.rollout.native.sampling import Sampling
from trainer.rollout.native.scheduler import Running, Scheduler
from trainer.rollout.native.slots import Slots
from trainer.rollout.stops import StopStrings
from trainer.tasks.tokenizer import vocabulary_size

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

KV = "engine/kv"
_PROMPT_TOKENS = 8192  # of one pass over prompts
_INVARIANT_PROMPT_TOKENS = 2048  # of every pass, under rollout.batch_invariant
_STEPS = 16  # of a GPU between two looks at which rows have ended; a CPU looks after each


class NativeEngine:
    """A :class:`trainer.rollout.base.RolloutEngine` without weights of its own."""

    has_own_weights, name = False, ENGINE

    def __init__(
        self,
        actor: Role,
        model: ModelConfig,
        rollout: RolloutConfig,
        *,
        cache: KvCache,
        tokenizer: PreTrainedTokenizerFast,
        saver: Saver,
        observer: MemoryObserver,
    ) -> None:
        self._actor, self._rollout, self._tokenizer, self._cache = actor, rollout, tokenizer, cache
        self._saver, self._observe = saver, observer
        self._ends, vocab_size = end_token_ids(model, tokenizer), vocabulary_size(tokenizer)
        self._stop_strings = StopStrings(rollout.stop, tokenizer)
        device, config = torch.device(torch.cuda.current_device()), actor.model.gpts()[0].config
        pieces = compiled() if rollout.compile else PLAIN
        decoder = Decoder(
            actor.model.gpts(),
            model,
            attention=attention.choose(device=device, dtype=config.params_dtype),
            pieces=pieces,
            vocab_size=vocab_size,
        )
        self._lockstep = Lockstep.of(model)
        is_alone = config.tensor_model_parallel_size == config.pipeline_model_parallel_size == 1
        self._is_collective = not is_alone or bool(self._lockstep)
        self._graphs = Graphs(saver) if device.type == "cuda" and not self._is_collective else None
        self._steps = _STEPS if device.type == "cuda" else 1
        self._most_rows = cache.rows
        kv_shape = (model.kv_heads // config.tensor_model_parallel_size, model.head_dim)
        is_stop = torch.isin(torch.arange(vocab_size), torch.tensor(self._ends)).to(device)
        with saver.region(KV, backup=False):
            self._slots = Slots(
                cache,
                decoder,
                pieces=pieces,
                kv_shape=kv_shape,
                is_stop=is_stop,
                is_fixed=rollout.batch_invariant,
            )
        self._is_ready = False
        saver.turns.add(self)

    # ---- sleep and wake-up -----------------------------------------------------------------------------------------

    def sync(self, actor: Role) -> None:
        """Nothing to do: there is no copy."""

    @contextmanager
    def awake(self) -> Iterator[None]:
        """Rollouts happen inside, the actor awake; as a rule both sleep after."""
        with self._actor.awake(kinds=FORWARD):
            try:
                self.wake_up()
                yield
            finally:
                self._is_ready = False
                self._saver.turns.done(self)

    def is_asleep(self, kind: str = "") -> bool:
        return all(map(self._saver.is_asleep, self._tags()))

    def wake_up(self) -> None:
        """Map the engine's memory. The actor must be awake with its own weights, and stay so until :meth:`sleep`."""
        self._actor.require(FORWARD, tag=self._actor.name)
        self._saver.turns.map(self.name, (), self._map)
        self._slots.reset()
        self._is_ready = True

    def _map(self) -> None:
        asleep = [tag for tag in self._tags() if self._saver.is_asleep(tag)]
        self._saver.check_room(asleep)
        for tag in asleep:
            sleeping.wake_up(tag, self._saver, self._observe)

    def sleep(self) -> None:
        """Release the engine's memory; an engine that is asleep stays so."""
        self._is_ready = False
        for tag in self._tags():
            sleeping.fall_asleep(tag, self._saver, self._observe)

    def close(self) -> None:
        """Nothing outlives the process."""

    def _tags(self) -> list[str]:
        return [KV, GRAPHS] if self._graphs is not None and self._graphs.is_used else [KV]

    # ---- generation ------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def generate(
        self,
        prompts: list[list[int]],
        *,
        seed: int,
        numbers: Sequence[int] | None = None,
        greedy: bool = False,
        limits: Sequence[int] | None = None,
    ) -> Responses:
        """One response to each of n prompts (token ids), as :class:`~trainer.rollout.base.RolloutEngine` says.

        Args:
            limits: tokens of each response, at most ``rollout.max_new_tokens``; None: that many.

        Raises:
            RuntimeError: the engine is asleep, or the actor's weights gave NaN.
            ValueError: a prompt is empty or longer than ``rollout.max_prompt_tokens``.
        """
        if not self._is_ready:
            raise RuntimeError("the rollout engine holds no weights: call wake_up() first")
        self._actor.require(FORWARD, tag=self._actor.name)
        check_prompts(prompts, longest=self._rollout.max_prompt_tokens)
        rollout = self._rollout
        sampling = Sampling(rollout.temperature, rollout.top_k, rollout.top_p, rollout.min_p, greedy)
        numbers = range(len(prompts)) if numbers is None else numbers
        limits = [rollout.max_new_tokens] * len(prompts) if limits is None else limits

        def draw() -> Results:
            scheduler = Scheduler.of(prompts, numbers, limits, cache=self._cache)
            results = Results(len(prompts), columns=rollout.max_new_tokens, device=self._slots.tokens.device)
            try:
                with _nondeterministic_allowed():
                    while self._advance(scheduler, results, seed=seed, sampling=sampling):
                        pass
            except torch.OutOfMemoryError:
                self._slots.reset()  # rows that were on their way are drawn anew, if at all
                raise
            return results

        with nullcontext() if self._is_collective else process_groups_destroyed():
            results = self._saver.turns.repeated(draw, is_collective=self._is_collective)
        results.check_finite(prompts)
        limit = rollout.max_prompt_tokens + rollout.max_new_tokens
        pad: int = self._tokenizer.pad_token_id  # type: ignore[assignment]
        return results.responses(prompts, pad=pad, ends=self._ends, limit=limit, tokenizer=self._tokenizer)

    def _advance(self, scheduler: Scheduler, results: Results, *, seed: int, sampling: Sampling) -> bool:
        """Let rows enter, decode a few steps, let rows leave -> whether any rank is not done."""
        is_fixed = self._rollout.batch_invariant
        most = max(_INVARIANT_PROMPT_TOKENS, self._rollout.max_prompt_tokens) if is_fixed else _PROMPT_TOKENS
        prompts, entries = scheduler.enter(most_tokens=most)
        tokens, is_busy = self._lockstep.most(sum(map(len, prompts)), int(bool(scheduler.running)))
        if not is_busy:
            return False
        if tokens:
            pad_to = most if is_fixed else tokens
            self._slots.enter(prompts, entries, seed=seed, sampling=sampling, pad_to=pad_to)
            self._collect(scheduler, results)
        rows = list(scheduler.running.values())[: self._most_rows]
        count, steps = self._lockstep.most(len(rows), min(self._steps, scheduler.steps_left))
        if steps:
            self._decode(rows, count=count, steps=steps, sampling=sampling)
            self._collect(scheduler, results)
        return True

    def _decode(self, rows: list[Running], *, count: int, steps: int, sampling: Sampling) -> None:
        """Some tokens more for ``rows``, in a batch of ``count`` at least."""
        is_fixed = self._rollout.batch_invariant
        count = self._cache.rows if is_fixed else count
        if self._graphs is not None:
            count = padded_rows(count, most=self._cache.rows)
            if (count, sampling) not in self._graphs and not self._has_captured(count, sampling):
                return
            self._fill_batch(rows, count)
            self._graphs.replay((count, sampling), times=steps)
            return
        self._fill_batch(rows, count)
        longest = max((row.prompt_tokens + row.drawn for row in rows), default=1)
        for step in range(steps):
            longest_now = self._cache.row_tokens if is_fixed else longest + step
            self._slots.decode(count, sampling=sampling, longest=longest_now, has_fixed_shapes=is_fixed)

    def _has_captured(self, count: int, sampling: Sampling) -> bool:
        """Whether there was room for a graph of ``count`` rows; if not, fewer are decoded at once from now on."""
        assert self._graphs is not None
        self._fill_batch([], count)

        def step() -> None:
            self._slots.decode(count, sampling=sampling, longest=self._cache.row_tokens, has_fixed_shapes=True)

        try:
            self._graphs.capture((count, sampling), step)
        except torch.OutOfMemoryError:
            if count == 1 or self._saver.turns.can_make_room:
                raise
            self._most_rows = count // 2
            warnings.warn(
                f"no GPU memory is left to decode {count} rows at once: {self._most_rows} from now on. A smaller "
                "rollout.kv_cache_gib would leave room for more",
                stacklevel=2,
            )
            return False
        return True

    def _fill_batch(self, rows: list[Running], count: int) -> None:
        slots = [row.slot for row in rows] + [self._slots.spare] * (count - len(rows))
        self._slots.batch[:count] = torch.tensor(slots).to(self._slots.batch.device)

    def _collect(self, scheduler: Scheduler, results: Results) -> None:
        """Take note of what has been drawn; rows that have ended leave."""
        state = self._slots.state.tolist()
        finished = []
        for slot, row in scheduler.running.items():
            seen, row.drawn = row.drawn, state[slot][COLUMN]
            if self._stop_strings:
                self._end_at_stop_string(row, seen=seen)
            if row.is_stopped or not state[slot][ALIVE]:
                finished.append(slot)
        if finished:
            self._hand_over(finished, scheduler, results)

    def _end_at_stop_string(self, row: Running, *, seen: int) -> None:
        tokens = self._slots.tokens[row.slot, : row.drawn].tolist()
        end = self._stop_strings.length_at_stop(tokens, checked=seen)
        if end is not None:
            row.drawn, row.is_stopped = end, True
            self._slots.state[row.slot, ALIVE] = 0

    def _hand_over(self, slots: list[int], scheduler: Scheduler, results: Results) -> None:
        rows = scheduler.leave(slots)
        where = torch.tensor(slots).to(self._slots.tokens.device)
        tokens = self._slots.tokens[where, :-1]
        lengths = torch.tensor([row.drawn for row in rows])
        last = tokens.gather(1, (lengths - 1).to(tokens.device)[:, None]).squeeze(1).cpu()
        stopped = torch.isin(last, torch.tensor(self._ends)) | torch.tensor([row.is_stopped for row in rows])
        results.put(
            torch.tensor([row.request.index for row in rows]),
            tokens=tokens,
            log_probs=self._slots.log_probs[where, :-1],
            lengths=lengths,
            stopped=stopped,
        )


@contextmanager
def _nondeterministic_allowed() -> Iterator[None]:
    """torch refuses running sums on a GPU under ``platform.deterministic``, of which those over several rows, as here,
    are the same every time."""
    is_strict = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(False)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(is_strict)
