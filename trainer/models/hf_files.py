"""Hugging Face model folders: weights read one tensor at a time, and a trained model written as such a folder."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import GenerationConfig

from trainer.common.files import naming
from trainer.config.schema import ModelConfig
from trainer.models.generation import GENERATION_FILE, generation_settings, vocabulary_settings
from trainer.models.hf_bridge import hf_config, to_hf

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedTokenizerFast

WEIGHTS_FILE = "model.safetensors"
INDEX_FILE = f"{WEIGHTS_FILE}.index.json"
SHARD_BYTES = 4 << 30


class SafetensorsFolder(Mapping[str, Tensor]):
    """The tensors in a folder's ``model.safetensors``, or in the shards that its index names; each is read from the
    memory-mapped file when it is asked for.

    Raises:
        ValueError: the folder has neither, lacks a shard, or has a damaged one.
    """

    def __init__(self, folder: Path) -> None:
        index = folder / INDEX_FILE
        files = sorted(set(json.loads(index.read_text())["weight_map"].values())) if index.is_file() else [WEIGHTS_FILE]
        lacking = [file for file in files if not (folder / file).is_file()]
        if lacking:
            raise ValueError(
                f"model.path={folder} lacks {', '.join(lacking)}: weights are read from {WEIGHTS_FILE}, or from the "
                f"files that {INDEX_FILE} names"
            )
        handles = [_opened(folder / file) for file in files]
        self._handles: dict[str, Any] = {name: handle for handle in handles for name in handle.keys()}  # noqa: SIM118

    def __getitem__(self, name: str) -> Tensor:
        return self._handles[name].get_tensor(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._handles)

    def __len__(self) -> int:
        return len(self._handles)


def _opened(file: Path) -> Any:
    try:
        return safe_open(file, framework="pt")
    except SafetensorError as error:
        raise ValueError(f"{file} is no whole safetensors file ({error}): copy or download it again") from error


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

    Raises:
        UnwritableFile: the disk refused.
    """
    with _writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
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
