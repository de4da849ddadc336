"""How questions and answers become token ids; the same in the parent, which measures them, and in the workers.

A question begins as the tokenizer begins a text, but does not end as one: what a post-processor appends (``</s>``, say)
is left out, since a response is to follow. In a chat template it is a user's turn, then the template's generation
prompt; a template that asks for the date gets ``TEMPLATE_DATE``, so that prompts are the same on every day.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from datetime import date
from typing import TYPE_CHECKING

from tokenizers import Tokenizer

from trainer.config.schema import Config, TokenizerConfig
from trainer.models.generation import end_token_ids
from trainer.tasks.tokenizer import EOS

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

TEMPLATE_DATE = date(2024, 7, 26)  # what the templates of Llama 3 write where there is no clock
_DATE = re.compile(r"""strftime_now\(\s*(["'])(.*?)\1\s*\)""")
_CLOCK = re.compile(r"strftime_now(?!\s+is\s+(?:not\s+)?defined)")
_RESPONSE = "(response)"
_RENDERINGS = 32  # of one question, in which a template that draws at random shows itself


class Encoder:
    """Token ids of questions and answers.

    Args:
        tokenizer: of :func:`trainer.tasks.tokenizer.load_tokenizer`, or a bare one that was trained on the task.
        ends: tokens that end a response beside the tokenizer's own (:func:`trainer.models.generation.end_token_ids`).

    Raises:
        ValueError: a chat template is asked for, and the tokenizer has none, or one whose prompts differ from time to
            time or end as a finished text does.
    """

    def __init__(
        self, config: TokenizerConfig, tokenizer: PreTrainedTokenizerFast | Tokenizer, *, ends: Collection[int] = ()
    ) -> None:
        self._path, self._template, self._chat = config.path, None, None
        if isinstance(tokenizer, Tokenizer):
            self._backend, eos = tokenizer, tokenizer.token_to_id(EOS)
        else:
            self._backend, eos = tokenizer.backend_tokenizer, tokenizer.eos_token_id
            self._backend.encode_special_tokens = tokenizer.split_special_tokens
        assert isinstance(eos, int), eos
        self._eos, self._ends = eos, {eos, *ends}
        self._backend.no_truncation()
        self._backend.no_padding()
        of_the_tokenizer = self._backend.encode("a").special_tokens_mask[::-1]
        self._appended = of_the_tokenizer.index(0) if 0 in of_the_tokenizer else 0
        if config.chat_template:
            assert not isinstance(tokenizer, Tokenizer)
            self._chat, self._template = tokenizer, self._dated_template(tokenizer)
            self._check_template()

    @classmethod
    def of(cls, config: Config, tokenizer: PreTrainedTokenizerFast | Tokenizer) -> Encoder:
        """The run's, in the parent and in the workers."""
        bare = isinstance(tokenizer, Tokenizer)
        return cls(
            config.tokenizer,
            tokenizer,
            ends=() if bare else end_token_ids(config.roles["actor"].model, tokenizer),
        )

    def questions(self, texts: Iterable[str]) -> list[list[int]]:
        """Each question as a prompt."""
        if self._chat is not None:
            turns = [self._turn(text) for text in texts]
            return [encoding.ids for encoding in self._backend.encode_batch_fast(turns, add_special_tokens=False)]
        encodings = self._backend.encode_batch_fast(list(texts))
        return [encoding.ids[: len(encoding.ids) - self._appended] for encoding in encodings]

    def answers(self, texts: Iterable[str]) -> list[list[int]]:
        """Each answer and the end-of-sequence token."""
        encodings = self._backend.encode_batch_fast(list(texts), add_special_tokens=False)
        return [[*encoding.ids, self._eos] for encoding in encodings]

    def replies(self, texts: Iterable[str], *, ends: Iterable[int]) -> list[list[int]]:
        """What an environment answers, as it follows a response; ``ends``: the token that each response ended with."""
        suffixes = list(texts) if self._chat is None else [self._next_turn(text) for text in texts]
        found = [encoding.ids for encoding in self._backend.encode_batch_fast(suffixes, add_special_tokens=False)]
        if self._chat is None:
            return found
        # A template ends the assistant's turn itself; a response that has ended is not ended twice.
        given = zip(found, ends, strict=True)
        return [ids[1:] if end in self._ends and self._ends.issuperset(ids[:1]) else ids for ids, end in given]

    def shortened(self, text: str, *, most: int) -> list[int]:
        """A question as a prompt of at most ``most`` tokens, without as much of its beginning as that takes.

        Raises:
            ValueError: what surrounds a question has more tokens than that by itself.
        """
        (ids,) = self.questions([text])
        while len(ids) > most and text:
            ends = [end for _, end in self._backend.encode(text, add_special_tokens=False).offsets]
            text = text[max(1, *ends[: len(ids) - most]) :]
            (ids,) = self.questions([text])
        if len(ids) > most:
            raise ValueError(
                f"rollout.max_prompt_tokens={most}, and what surrounds every question has {len(ids)} tokens: use "
                f"rollout.max_prompt_tokens={2 * len(ids)} or more"
            )
        return ids

    def _turn(self, text: str) -> str:
        return self._rendered([{"role": "user", "content": text}])

    def _next_turn(self, text: str) -> str:
        """What a template writes behind an assistant's turn when a user's follows."""
        turns = [("user", "2 + 2"), ("assistant", _RESPONSE), ("user", text)]
        _, found, rest = self._rendered([{"role": role, "content": said} for role, said in turns]).partition(_RESPONSE)
        if not found:
            raise ValueError(
                f"the chat template in tokenizer.path={self._path} does not write an assistant's turn as it is, so no "
                "turn can follow a response: use a task of one turn, or tokenizer.chat_template=false"
            )
        return rest

    def _rendered(self, messages: list[dict[str, str]]) -> str:
        assert self._chat is not None
        try:
            turn = self._chat.apply_chat_template(
                messages, chat_template=self._template, add_generation_prompt=True, tokenize=False
            )
        except Exception as error:  # a template is a program, which may do anything that its sandbox lets it
            raise ValueError(
                f"the chat template in tokenizer.path={self._path} fails ({type(error).__name__}: {error})"
            ) from error
        assert isinstance(turn, str)
        return turn

    def _dated_template(self, tokenizer: PreTrainedTokenizerFast) -> str:
        where = f"the tokenizer in tokenizer.path={self._path}"
        if not tokenizer.chat_template:
            raise ValueError(
                f"tokenizer.chat_template=true, but {where} has none: use tokenizer.chat_template=false, or the "
                "tokenizer of a chat model"
            )
        dated = _DATE.sub(lambda call: repr(TEMPLATE_DATE.strftime(call[2])), tokenizer.get_chat_template())
        if _CLOCK.search(dated):
            raise ValueError(
                f"the chat template of {where} uses strftime_now other than to write a date in a fixed format, so its "
                "prompts would differ from day to day: write the date into the template"
            )
        return dated

    def _check_template(self) -> None:
        where = f"the chat template in tokenizer.path={self._path}"
        if len({self._turn("2 + 2") for _ in range(_RENDERINGS)}) > 1:
            raise ValueError(f"{where} gives another prompt each time: take what it draws at random out of it")
        last = self.questions(["2 + 2"])[0][-1]
        if last in self._ends:
            raise ValueError(
                f"{where} ends a prompt as a finished text (with token {last}), after which nothing follows: it needs "
                "a generation prompt ({% if add_generation_prompt %}...)"
            )
