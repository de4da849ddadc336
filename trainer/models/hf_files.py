"""A trained model written as a Hugging Face folder; :mod:`trainer.common.safetensors_folder` reads such folders."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor
from transformers import GenerationConfig

from trainer.common.files import naming
from trainer.common.json_files import COPY_AGAIN, read_json
from trainer.common.safetensors_folder import INDEX_FILE, WEIGHTS_FILE
from trainer.config.hf_architecture import GENERATION_FILE
from trainer.config.schema import ModelConfig
from trainer.models.generation import generation_settings, vocabulary_settings
from trainer.models.hf_bridge import hf_config, to_hf

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedTokenizerFast

SHARD_BYTES = 4 << 30


def save_hf(
    named_tensors: Iterable[tuple[str, Tensor]],
    *,
    model: ModelConfig,
    tokenizer: PreTrainedTokenizerFast,
    folder: Path,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Write a folder that ``AutoModelForCausalLM`` and ``AutoTokenizer`` load, and that ``model.path`` takes.

    Args:
        named_tensors: of :func:`trainer.megatron.sharding.whole_tensors`, an actor's.
        shard_bytes: of weights that are gathered in host memory before they are written to a file of their own.

    The generation settings of the folder that the model started from are written back.

    Raises:
        ValueError: no Hugging Face family has this architecture.
        UnwritableFile: the disk refused.
    """
    config = hf_config(model, **vocabulary_settings(model, tokenizer))
    weights = to_hf(named_tensors, model=model)
    write_folder(weights, config=config, tokenizer=tokenizer, folder=folder, shard_bytes=shard_bytes)
    settings = generation_settings(model)
    if settings:
        text = json.dumps(settings | {"eos_token_id": config.eos_token_id}, indent=2) + "\n"
        with _writing(folder):
            (folder / GENERATION_FILE).write_text(text)


def write_folder(
    weights: Iterable[tuple[str, Tensor]],
    *,
    config: PreTrainedConfig,
    tokenizer: PreTrainedTokenizerFast,
    folder: Path,
    shard_bytes: int,
) -> None:
    """Write config, generation config, tokenizer and ``weights`` (Hugging Face names, tied ones once).

    What a model that lay there before would add to this one is removed.

    Raises:
        UnwritableFile: the disk refused.
    """
    with _writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        _remove_model(folder)
        config.save_pretrained(folder)
        GenerationConfig.from_model_config(config).save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        files: dict[str, str] = {}
        total_bytes = 0
        for number, shard in enumerate(_shards(weights, shard_bytes=shard_bytes), start=1):
            file = f"model-{number:05d}.safetensors"
            save_file(shard, folder / file, metadata={"format": "pt"})
            files |= dict.fromkeys(shard, file)
            total_bytes += sum(tensor.nbytes for tensor in shard.values())
        if len(set(files.values())) == 1:
            (folder / next(iter(files.values()))).rename(folder / WEIGHTS_FILE)
        else:
            index = {"metadata": {"total_size": total_bytes}, "weight_map": files}
            (folder / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n")


def _remove_model(folder: Path) -> None:
    """Remove what would be read beside a new model's files: the index and its shards, or the only file, and what a
    tokenizer need not have."""
    index = folder / INDEX_FILE
    try:
        shards = set(read_json(index, advice=COPY_AGAIN).get("weight_map", {}).values()) if index.exists() else set()
    except (ValueError, AttributeError, TypeError):  # of a save that was cut off
        shards = set()
    names = [name for name in shards if re.fullmatch(r"model-[\d-]+(of-\d+)?\.safetensors", str(name))]
    for name in (INDEX_FILE, WEIGHTS_FILE, *names, "chat_template.jinja", "added_tokens.json"):
        (folder / name).unlink(missing_ok=True)


@contextmanager
def _writing(folder: Path) -> Iterator[None]:
    """What the system refuses inside is an UnwritableFile, also where safetensors says so in an error of its own."""
    with naming(folder):
        try:
            yield
        except SafetensorError as error:
            raise OSError(str(error)) from error


def _shards(tensors: Iterable[tuple[str, Tensor]], *, shard_bytes: int) -> Iterator[dict[str, Tensor]]:
    """Host copies of the tensors, as many at a time as fit in ``shard_bytes`` (at least one)."""
    shard: dict[str, Tensor] = {}
    for name, tensor in tensors:
        if shard and sum(kept.nbytes for kept in shard.values()) + tensor.nbytes > shard_bytes:
            yield shard
            shard = {}
        shard[name] = tensor.detach().cpu().contiguous().clone()
    yield shard
