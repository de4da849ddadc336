"""Which tokens end a response, for every rollout engine, and the generation settings that a model's folder brings."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer.config.schema import ModelConfig
from trainer.tasks.tokenizer import vocabulary_size

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

GENERATION_FILE = "generation_config.json"


def end_token_ids(model: ModelConfig, tokenizer: PreTrainedTokenizerFast) -> tuple[int, ...]:
    """Every end-of-sequence id of the model's ``generation_config.json``, its ``config.json`` and the tokenizer. Each
    ends a response, whatever the warm-up taught.

    Raises:
        ValueError: a file's ``eos_token_id`` is neither a token id nor a list of them.
    """
    found: list[int] = []
    for name in (GENERATION_FILE, "config.json") if model.path is not None else ():
        given = _read(model.path, name).get("eos_token_id")
        ids = given if isinstance(given, list) else [] if given is None else [given]
        if not all(type(token_id) is int and token_id >= 0 for token_id in ids):
            raise ValueError(
                f"{Path(str(model.path), name)}: eos_token_id is {given!r}, must be a token id or a list of them"
            )
        found += ids
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
    if folder is None or not file.is_file():
        return {}
    try:
        settings = json.loads(file.read_text())
    except ValueError as error:
        raise ValueError(f"{file} is not JSON ({error}): copy or download it again") from error
    if not isinstance(settings, dict):
        raise ValueError(f"{file} holds a {type(settings).__name__}, must hold an object: copy or download it again")
    return settings
