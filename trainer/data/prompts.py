"""Which questions go into which step on which rank, and their tokens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from trainer.common.seeds import seed_for
from trainer.config.schema import Config
from trainer.data.batch import Sequences
from trainer.megatron.groups import data_parallel_rank, data_parallel_size, max_over_ranks
from trainer.tasks.base import Example, Task
from trainer.tasks.verifiers import reward_of

_LENGTH_MULTIPLE = 8


class Prompts:
    """Draws examples of ``task``. Global draws depend on (seed, purpose, step) alone; each data-parallel rank takes
    its contiguous share, so the questions of a step do not depend on the number of ranks."""

    def __init__(self, config: Config, *, task: Task, tokenizer: Any) -> None:
        """Raises ValueError if a chat template is asked for and the tokenizer has none."""
        self._config, self._task, self.tokenizer = config, task, tokenizer
        if config.tokenizer.chat_template and not tokenizer.chat_template:
            raise ValueError(
                f"tokenizer.chat_template=true, but the tokenizer in tokenizer.path={config.tokenizer.path} has none: "
                "use tokenizer.chat_template=false, or the tokenizer of a chat model"
            )

    def for_step(self, step: int) -> list[Example]:
        """This rank's examples of a PPO step, each repeated ``algo.responses_per_prompt`` times."""
        settings = self._config.algo
        drawn = self._draw("prompts", step, settings.prompts_per_step)
        return [example for example in drawn for _ in range(settings.responses_per_prompt)]

    def heldout(self, count: int) -> list[Example]:
        """This rank's share of the first ``count`` held-out examples (or of all, if there are fewer)."""
        examples = self._task.heldout
        total = min(count, len(examples))
        return [examples[i] for i in range(data_parallel_rank(), total, data_parallel_size())]

    def encode(self, examples: Sequence[Example]) -> list[list[int]]:
        """Token ids of the questions, begun as the tokenizer begins a text, or as a user's turn in its template."""
        if not self._config.tokenizer.chat_template:
            return [self.tokenizer.encode(example.question) for example in examples]
        turns = [
            self.tokenizer.apply_chat_template(
                [{"role": "user", "content": example.question}], add_generation_prompt=True, tokenize=False
            )
            for example in examples
        ]
        return [self.tokenizer.encode(turn, add_special_tokens=False) for turn in turns]

    def scores(self, responses: Sequence[str], examples: Sequence[Example]) -> list[float]:
        """What each response is paid: by the function that ``reward`` names, or else the task's verdict."""
        name = self._config.reward
        if name is None:
            return self.verdicts(responses, examples)
        return [reward_of(name, text, example) for text, example in zip(responses, examples, strict=True)]

    def verdicts(self, responses: Sequence[str], examples: Sequence[Example]) -> list[float]:
        """The task's verdict on each response, in [0, 1]."""
        return [self._task.score(text, example) for text, example in zip(responses, examples, strict=True)]

    def supervised_batch(self, step: int) -> Sequences:
        """Question and answer of warm-up step ``step``; the response is the answer and EOS."""
        examples = self._draw("warm_up", step, self._config.algo.warmup_batch_size)
        questions = self.encode(examples)
        answers = [
            [*self.tokenizer.encode(example.answer, add_special_tokens=False), self.tokenizer.eos_token_id]
            for example in examples
        ]
        longest = max_over_ranks(max(len(q) + len(a) for q, a in zip(questions, answers, strict=True)))
        length = -(-longest // _LENGTH_MULTIPLE) * _LENGTH_MULTIPLE
        tokens = torch.full((len(examples), length), self.tokenizer.pad_token_id)
        mask = torch.zeros(len(examples), length, dtype=torch.bool)
        for row, (question, answer) in enumerate(zip(questions, answers, strict=True)):
            end = len(question) + len(answer)
            tokens[row, :end] = torch.tensor(question + answer)
            mask[row, len(question) : end] = True
        device = torch.cuda.current_device()
        return Sequences(tokens.to(device), mask[:, 1:].to(device))

    def minibatch_rows(self, sequences: int, *, step: int, epoch: int) -> Iterator[Tensor]:
        """Row numbers of each minibatch of one epoch over this rank's sequences.

        The first epoch keeps the order of the rollout, so that its micro-batches are those which the log-probs were
        computed in and the first ratio is exactly one; later epochs are shuffled.
        """
        order = torch.arange(sequences)
        if epoch > 0:
            seed = seed_for(self._config.algo.shuffle_seed, f"shuffle/{epoch}", step=step, rank=data_parallel_rank())
            order = torch.randperm(sequences, generator=torch.Generator().manual_seed(seed))
        yield from order.chunk(self._config.algo.minibatches)

    def _draw(self, purpose: str, step: int, count: int) -> list[Example]:
        examples = self._task.train
        generator = torch.Generator().manual_seed(seed_for(self._config.seed, purpose, step=step))
        indices = torch.randint(len(examples), (count,), generator=generator)
        share = count // data_parallel_size()
        start = data_parallel_rank() * share
        return [examples[i] for i in indices[start : start + share].tolist()]
