"""The tokenizer: a small byte-level BPE trained on the task's own text, or any Hugging Face tokenizer folder.

Byte-level (as in GPT-2), so any text round-trips; every digit is its own token, so numbers are spelled alike
everywhere. A trained one is a function of the corpus alone: each rank trains its own and all agree. It adds
no special tokens by itself and reads none out of text: ``<eos>`` in a question is letters and brackets.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from trainer.common.json_files import COPY_AGAIN, read_json
from trainer.tasks.base import Environment

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

PAD, BOS, EOS = SPECIAL_TOKENS = ("<pad>", "<bos>", "<eos>")
_FILES = (  # of a tokenizer folder, where they exist
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json"),
    "config.json",
)
SMALLEST_VOCAB_SIZE = 256 + len(SPECIAL_TOKENS)


def load_tokenizer(path: str | None, *, task: Environment, vocab_size: int) -> PreTrainedTokenizerFast:
    """Load the tokenizer in the folder ``path``, or train one on ``task.corpus()``.

    The result has an eos and a pad token (eos pads where there is no other) and ids below ``vocab_size``; a trained one
    has fewer entries when the corpus has no more to merge. A checkpoint may have more rows than its tokenizer has ids.

    Raises:
        ValueError: no tokenizer at ``path``, none that is fast, no eos token, or ``vocab_size`` is too small.
    """
    tokenizer = _train(task.corpus(), vocab_size=vocab_size) if path is None else _load(path)
    ids = vocabulary_size(tokenizer)
    if ids > vocab_size:
        raise ValueError(
            f"the tokenizer in {path} has {len(tokenizer)} entries with ids up to {ids - 1}, and the model takes "
            f"{vocab_size}: use tokenizer.vocab_size={ids} or more, or with a checkpoint the tokenizer that belongs to "
            "it"
        )
    return tokenizer


def light_tokenizer(path: str | None, *, task: Environment, vocab_size: int) -> PreTrainedTokenizerFast | Tokenizer:
    """The same tokenizer; a trained one comes bare, without importing transformers."""
    if path is None:
        return _train_bpe(task.corpus(), vocab_size=vocab_size)
    return load_tokenizer(path, task=task, vocab_size=vocab_size)


def vocab_size_of(path: str | None, *, task: Environment, vocab_size: int) -> int:
    """:func:`vocabulary_size` of the run's tokenizer."""
    return vocabulary_size(light_tokenizer(path, task=task, vocab_size=vocab_size))


def vocabulary_size(tokenizer: PreTrainedTokenizerFast | Tokenizer) -> int:
    """Largest id + 1: the rows that an embedding needs. A vocabulary with holes has fewer entries."""
    return max(tokenizer.get_vocab().values()) + 1


def tokenizer_digest(path: str | None) -> str | None:
    """By what the tokenizer in a folder is known again, wherever the folder lies: of the content of its files. None
    without a folder."""
    if path is None or not os.path.isdir(path):
        return None
    digest = hashlib.sha256()
    for file in (Path(path, name) for name in (*_FILES, "chat_template.jinja", "merges.txt")):
        if file.name != "config.json" and file.is_file():
            content = file.read_bytes()
            digest.update(f"{file.name} {len(content)}\n".encode() + content)
    return digest.hexdigest()[:32]


def check_vocab_size(vocab_size: int) -> None:
    """Raise ``ValueError`` if a trained tokenizer's bytes and special tokens do not fit in ``vocab_size``."""
    if vocab_size < SMALLEST_VOCAB_SIZE:
        raise ValueError(
            f"tokenizer.vocab_size={vocab_size} is too small for 256 bytes and {len(SPECIAL_TOKENS)} special "
            f"tokens: use tokenizer.vocab_size={SMALLEST_VOCAB_SIZE} or more"
        )


def _train_bpe(corpus: Iterable[str], *, vocab_size: int) -> Tokenizer:
    check_vocab_size(vocab_size)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.encode_special_tokens = True
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus, trainer)
    return tokenizer


def _train(corpus: Iterable[str], *, vocab_size: int) -> PreTrainedTokenizerFast:
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(
        tokenizer_object=_train_bpe(corpus, vocab_size=vocab_size),
        pad_token=PAD,
        bos_token=BOS,
        eos_token=EOS,
        clean_up_tokenization_spaces=False,
        split_special_tokens=True,
    )


def _load(path: str) -> PreTrainedTokenizerFast:
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    if not os.path.isdir(path):
        raise ValueError(
            f"tokenizer.path={path} is no folder ({os.path.abspath(path)}): give one with tokenizer.path=..."
        )
    for name in _FILES:
        if (file := Path(path, name)).exists():
            read_json(file, advice=COPY_AGAIN)
    try:
        tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # transformers raises anything on a folder that it cannot read
        raise ValueError(f"tokenizer.path={path} has no tokenizer that transformers can load: {error}") from error
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        raise ValueError(
            f"tokenizer.path={path} has a {type(tokenizer).__name__}: a fast one (tokenizer.json) is needed"
        )
    if tokenizer.eos_token_id is None:
        raise ValueError(
            f"the tokenizer in tokenizer.path={path} has no eos token: set eos_token in tokenizer_config.json"
        )
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer
