"""Which questions go into which step on which rank, and their tokens."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, distributed

from trainer.common.multiples import LENGTH_MULTIPLE, round_up
from trainer.common.seeds import seed_for
from trainer.config.schema import Config
from trainer.data.batch import Sequences
from trainer.data.demonstrations import told, turns
from trainer.data.encoding import Encoder
from trainer.data.rewards import Payer, reply_to
from trainer.data.selection import Selection, demonstrated, digest_of, drawn_positions, purpose_of_round, stand_in
from trainer.megatron.groups import asked_once, data_parallel_rank, data_parallel_size, max_over_ranks
from trainer.tasks.base import Environment, Example, Reply, ResponseInfo


class Prompts:
    """Draws examples of ``task``, an environment, and hands on what it answers. Global draws depend on (seed, purpose,
    step) alone; each data-parallel rank takes its share, so the questions of a step do not depend on the number of
    ranks.

    Args:
        selection: the parent's; without one nothing is left out.
    """

    def __init__(
        self, config: Config, *, task: Environment, tokenizer: Any, selection: Selection | None = None
    ) -> None:
        """Raises ValueError if the tokenizer has no chat template of use and one is asked for."""
        self._config, self.environment, self.tokenizer = config, task, tokenizer
        self._encoder = Encoder.of(config, tokenizer)
        self._measured_digest = selection.digest if selection else None
        self.digest = self._measured_digest or digest_of(task)
        self._dropped = selection.dropped if selection else frozenset()
        self._dropped_heldout = selection.dropped_heldout if selection else frozenset()

    def require_same_everywhere(self) -> None:
        """Raise ValueError on every rank unless all of them hold the examples that the parent has measured. Collective
        over the default group."""
        digests: list[str] = [""] * distributed.get_world_size()
        distributed.all_gather_object(digests, digest_of(self.environment))
        wanted = self._measured_digest or digests[0]
        others = [str(rank) for rank, digest in enumerate(digests) if digest != wanted]
        if others:
            than = "the launching process has measured" if self._measured_digest else "rank 0 holds"
            raise ValueError(
                f"rank {', '.join(others)} holds other questions than {than}: equal settings of a task must give equal "
                "questions. Do nodes read different files? Does the task go through a set, whose order Python's hash "
                "seed decides? (Sort it.)"
            )

    @property
    def pad(self) -> int:
        """The token that pads rows."""
        return self.tokenizer.pad_token_id

    def for_step(self, step: int, *, round_number: int = 0) -> list[Example]:
        """This rank's examples of a PPO step, each repeated ``algo.responses_per_prompt`` times. ``round_number``: of
        dynamic sampling, whose later rounds have other questions."""
        settings = self._config.algo
        population = len(self.environment.train)
        drawn = self._draw(
            purpose_of_round(round_number),
            step,
            settings.prompts_per_step,
            own=self._own_prompts(),
            population=population,
        )
        return [example for example in drawn for _ in range(settings.responses_per_prompt)]

    def response_numbers(self) -> list[int]:
        """Of the responses to :meth:`for_step` among those of all ranks."""
        responses = self._config.algo.responses_per_prompt
        return [prompt * responses + i for prompt in self._own_prompts() for i in range(responses)]

    def _own_prompts(self) -> list[int]:
        """This rank's prompts among those of a step: of each minibatch an equal, contiguous share. So the same prompts
        make a minibatch however many ranks there are, unless a minibatch has fewer prompts than there are ranks (or
        splits a prompt's responses): then a rank's share of a step is contiguous."""
        settings, ranks = self._config.algo, data_parallel_size()
        parts = settings.minibatches if settings.prompts_per_step % (ranks * settings.minibatches) == 0 else 1
        size = settings.prompts_per_step // parts
        share = _share(size)
        return [part * size + number for part in range(parts) for number in share]

    def heldout(self, count: int) -> list[Example]:
        """This rank's share of the first ``count`` held-out examples (or of all, if there are fewer)."""
        examples = [example for i, example in enumerate(self.environment.heldout) if i not in self._dropped_heldout]
        total = min(count, len(examples))
        return [examples[i] for i in range(data_parallel_rank(), total, data_parallel_size())]

    def encode(self, examples: Sequence[Example]) -> list[list[int]]:
        """Token ids of the questions; see :class:`trainer.data.encoding.Encoder`."""
        prompts = self._encoder.questions(example.question for example in examples)
        if self._config.data.too_long != "truncate":
            return prompts
        most = self._config.rollout.max_prompt_tokens
        return [
            prompt if len(prompt) <= most else self._encoder.shortened(example.question, most=most)
            for prompt, example in zip(prompts, examples, strict=True)
        ]

    def continued(self, texts: Sequence[str], *, ends: Sequence[int]) -> list[list[int]]:
        """Token ids of the environment's answers; see :meth:`trainer.data.encoding.Encoder.replies`."""
        return self._encoder.replies(texts, ends=ends)

    def replies(
        self,
        episodes: Sequence[Sequence[str]],
        examples: Sequence[Example],
        infos: Sequence[ResponseInfo],
        *,
        payer: Payer,
    ) -> list[Reply]:
        """The environment's reply to the last response of each episode, of which all responses are given."""
        given = zip(episodes, examples, infos, strict=True)
        return [
            reply_to(self._config, self.environment, said, example, info, payer=payer) for said, example, info in given
        ]

    def _demonstrations(self, examples: Sequence[Example]) -> list[list[tuple[list[int], list[int]]]]:
        """What the warm-up teaches, as :func:`trainer.data.demonstrations.turns` has it, or as much of it as an episode
        may have."""
        shown = asked_once(lambda: [told(self.environment, example) for example in examples])
        found = turns(self.encode(examples), shown, self._encoder)
        if self._config.data.too_long != "truncate":
            return found
        rollout, shortened = self._config.rollout, []
        for demonstration in found:
            kept, length = [], 0
            for before, response in demonstration:
                length += len(before)
                if length > rollout.max_prompt_tokens:
                    break
                kept.append((before, response[: rollout.max_new_tokens]))
                length += len(kept[-1][1])
            shortened.append(kept)
        return shortened

    def supervised_batch(self, step: int) -> Sequences:
        """What warm-up step ``step`` shows: each question and its demonstration, of which the responses are to be
        learned, up to the end of sequence."""
        algo = self._config.algo
        population = demonstrated(algo, len(self.environment.train))
        examples = self._draw(
            "warm_up", step, algo.warmup_batch_size, own=_share(algo.warmup_batch_size), population=population
        )
        demonstrations = self._demonstrations(examples)
        longest = max_over_ranks(max(sum(map(len, itertools.chain(*shown))) for shown in demonstrations))
        length = round_up(longest, LENGTH_MULTIPLE)
        tokens = torch.full((len(examples), length), self.tokenizer.pad_token_id)
        mask = torch.zeros(len(examples), length, dtype=torch.bool)
        for row, demonstration in enumerate(demonstrations):
            end = 0
            for before, response in demonstration:
                first, start = end, end + len(before)
                end = start + len(response)
                tokens[row, first:end] = torch.tensor(before + response)
                mask[row, start:end] = True
        device = torch.cuda.current_device()
        return Sequences(tokens.to(device), mask[:, 1:].to(device))

    def minibatch_rows(self, sequences: int, *, step: int, epoch: int) -> Iterator[Tensor]:
        """Row numbers of each minibatch of one epoch over this rank's sequences.

        The first epoch keeps the order of the rollout, so that its micro-batches are those which the log-probs were
        computed in and the first ratio is exactly one. In later epochs the i-th sequences of all minibatches change
        places at random. Ranks need not exchange sequences for that, and the sequences that make a minibatch of all
        ranks do not depend on their number (see :meth:`_own_prompts`).
        """
        settings = self._config.algo
        rows = torch.arange(sequences).view(settings.minibatches, -1)
        if epoch > 0:
            size, generator = rows.shape[1], torch.Generator()
            generator.manual_seed(seed_for(settings.shuffle_seed, f"shuffle/{epoch}", step=step))
            order = torch.rand(len(rows), size * data_parallel_size(), generator=generator).argsort(dim=0)
            first = size * data_parallel_rank()
            rows = rows.gather(0, order[:, first : first + size])
        yield from rows

    def _draw(self, purpose: str, step: int, count: int, *, own: Iterable[int], population: int) -> list[Example]:
        examples = self.environment.train
        positions = drawn_positions(self._config, purpose, step, count=count, population=population)
        return [
            examples[stand_in(positions[number], dropped=self._dropped, population=len(examples))] for number in own
        ]


def _share(count: int) -> range:
    """This rank's contiguous share of ``count`` things, a multiple of the number of ranks."""
    size = count // data_parallel_size()
    return range(data_parallel_rank() * size, (data_parallel_rank() + 1) * size)
