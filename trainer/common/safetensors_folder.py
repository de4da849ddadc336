"""The tensors of a model folder: which file each lies in, their headers, and by what a folder is known again."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from trainer.common.json_files import COPY_AGAIN, TEXT, foreign_content, object_of, read_json

WEIGHTS_FILE = "model.safetensors"
INDEX_FILE = f"{WEIGHTS_FILE}.index.json"
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "C64": torch.complex64,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}
_SAMPLES, _SAMPLE_BYTES = 16, 4096  # of each file's data, for its digest


class SafetensorsFolder(Mapping[str, Tensor]):
    """The tensors in a folder's ``model.safetensors``, or else those that its index names, each in the shard that the
    index names for it. Each is read from the memory-mapped file when it is asked for.

    Raises:
        ValueError: the folder has neither, lacks a shard, has a damaged one, or one without a tensor that it should
            have.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._files = _files_of(folder)
        lacking = [file for file in dict.fromkeys(self._files.values()) if not (folder / file).is_file()]
        if lacking:
            raise ValueError(
                f"{folder} lacks {', '.join(lacking)}: weights are read from {WEIGHTS_FILE}, or from the "
                f"files that {INDEX_FILE} names"
            )
        self._shards = {file: _opened(folder / file) for file in self.file_names}
        if set(self._files) == {WEIGHTS_FILE}:
            self._files = dict.fromkeys(self._shards[WEIGHTS_FILE].keys(), WEIGHTS_FILE)
        held = {file: set(shard.keys()) for file, shard in self._shards.items()}
        for name, file in self._files.items():
            if name not in held[file]:
                raise ValueError(f"{folder / INDEX_FILE} says that {name} is in {file}, which lacks it: {COPY_AGAIN}")

    @property
    def file_names(self) -> list[str]:
        return sorted(set(self._files.values()))

    def __getitem__(self, name: str) -> Tensor:
        return self._shards[self._files[name]].get_tensor(name)

    def __contains__(self, name: object) -> bool:
        return name in self._files  # Mapping's own reads the tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def __len__(self) -> int:
        return len(self._files)

    def headers(self) -> dict[str, Tensor]:
        """Name -> a tensor of the same shape and dtype without content (on torch's ``meta`` device).

        Raises:
            ValueError: a dtype that torch does not have.
        """
        return {name: self._header(name) for name in self}

    def _header(self, name: str) -> Tensor:
        described = self._shards[self._files[name]].get_slice(name)
        dtype = _DTYPES.get(described.get_dtype())
        if dtype is None:
            raise ValueError(f"{name} in {self.folder / self._files[name]} has the dtype {described.get_dtype()}")
        return torch.empty(described.get_shape(), dtype=dtype, device="meta")

    def has_own_head(self) -> bool:
        """Whether there is a vocabulary projection that is not the embedding. transformers uses such a one whatever
        ``tie_word_embeddings`` says."""
        return HEAD in self and EMBEDDING in self and not torch.equal(self[HEAD], self[EMBEDDING])

    def digest(self) -> str:
        """SHA-256 (hex) of each file's name, size and header (names, dtypes, shapes of its tensors) and of 16 samples
        of 4 KiB, evenly spread over its data: not of all, which may be 100 GB. It tells models apart, and states of
        one training; it is no checksum, and does not see a change between the samples."""
        digest = hashlib.sha256()
        for file in self.file_names:
            path = self.folder / file
            size = path.stat().st_size
            with path.open("rb") as content:
                first = content.read(8)
                header_bytes = int.from_bytes(first, "little")
                digest.update(json.dumps([file, size]).encode() + first + content.read(header_bytes))
                begin = 8 + header_bytes
                for sample in range(_SAMPLES):
                    content.seek(begin + (size - begin) * sample // _SAMPLES)
                    digest.update(content.read(_SAMPLE_BYTES))
        return digest.hexdigest()


def has_weights(folder: Path) -> bool:
    """Whether there is anything to read; a folder may hold a config alone."""
    return any((folder / name).exists() for name in (WEIGHTS_FILE, INDEX_FILE))


def _files_of(folder: Path) -> dict[str, str]:
    """Name of each tensor -> its file; without an index that of the only file."""
    index = folder / INDEX_FILE
    if (folder / WEIGHTS_FILE).exists() or not index.exists():  # as transformers chooses
        return {WEIGHTS_FILE: WEIGHTS_FILE}
    files = read_json(index, advice=COPY_AGAIN, fields={"weight_map": object_of(TEXT)})["weight_map"]
    foreign = next((file for file in files.values() if Path(file).name != file), None)
    if foreign is not None:
        raise ValueError(f"{index} names the file {foreign!r}, which is none of the folder: {COPY_AGAIN}")
    if not files:
        raise ValueError(f"{index} has an empty weight_map: {COPY_AGAIN}")
    return files


def _opened(file: Path) -> Any:
    try:
        return safe_open(file, framework="pt")
    except (SafetensorError, OSError) as error:
        with file.open("rb") as content:
            problem, advice = foreign_content(content.read(512))
        problem = problem or f"is no whole safetensors file ({error})"
        raise ValueError(f"{file} {problem}: {advice or COPY_AGAIN}") from error
