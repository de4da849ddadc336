"""Which tokens end a response, for every rollout engine, and the generation settings that a model's folder brings."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer.common.json_files import COPY_AGAIN, Kind, read_json
from trainer.config.hf_architecture import GENERATION_FILE, listed
from trainer.config.schema import ModelConfig
from trainer.tasks.tokenizer import vocabulary_size

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

_FIELDS = {
    "eos_token_id": Kind(
        "a token id, a list of them, or null",
        lambda given: all(
            type(token_id) is int and token_id >= 0
            for token_id in (given if isinstance(given, list) else () if given is None else (given,))
        ),
    )
}


def end_token_ids(model: ModelConfig, tokenizer: PreTrainedTokenizerFast) -> tuple[int, ...]:
    """Every end-of-sequence id of the model's ``generation_config.json``, its ``config.json`` and the tokenizer. Each
    ends a response, whatever the warm-up taught.

    Raises:
        ValueError: a file's ``eos_token_id`` is neither a token id nor a list of them.
    """
    found: list[int] = []
    for name in (GENERATION_FILE, "config.json") if model.path is not None else ():
        found += listed(_read(model.path, name).get("eos_token_id"))
    assert isinstance(tokenizer.eos_token_id, int)
    return tuple(dict.fromkeys([*found, tokenizer.eos_token_id]))


def vocabulary_settings(model: ModelConfig, tokenizer: PreTrainedTokenizerFast) -> dict[str, Any]:
    """What :func:`trainer.models.hf_bridge.hf_config` has to know of the tokenizer."""
    ends = end_token_ids(model, tokenizer)
    return {
        "vocab_size": model.embedding_rows(vocabulary_size(tokenizer)),
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": ends[0] if len(ends) == 1 else list(ends),
        "pad_token_id": tokenizer.pad_token_id,
    }


def generation_settings(model: ModelConfig) -> dict[str, Any]:
    """What the model's ``generation_config.json`` says; nothing without one."""
    return _read(model.path, GENERATION_FILE)


def _read(folder: str | None, name: str) -> dict[str, Any]:
    file = Path(folder or "", name)
    return {} if folder is None or not file.exists() else read_json(file, advice=COPY_AGAIN, fields=_FIELDS)
