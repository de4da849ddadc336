"""One folder of torch.distributed.checkpoint (DCP): ``__<rank>_0.distcp`` of every rank, and ``.metadata``.

Who writes what several ranks hold alike is DCP's decision, which spreads it over them. Three things are ours. DCP's
writer keeps a copy of every tensor that is part of a larger storage, all of them until its file is written; it is given
storages of their own that share the memory. It waits for the disk before the end of ``.metadata`` has left Python's
buffer; here everything is synced again once it is written. And its reader unpickles whatever it finds; here only
what describes tensors.
"""

from __future__ import annotations

import hashlib
import io
import math
import os
import pickle
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint import CheckpointException, filesystem, metadata
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem, SavePlan

from trainer.checkpoint import folder
from trainer.checkpoint.manifest import DESCRIPTION_FILE, SavedFile
from trainer.checkpoint.pieces import Pieces
from trainer.checkpoint.writing import SaveError, on_every_rank

State = Mapping[str, Pieces]
_BLOCK_BYTES = 16 * 2**20
_DESCRIBING = ("torch", "torch.serialization", metadata.__name__, filesystem.__name__)


def save(state: State, directory: Path, *, group: distributed.ProcessGroup, checksums: bool) -> dict[str, SavedFile]:
    """Write what all ranks hold into ``directory`` -> name of every file, with the directory's -> what it is known by.
    All of them are on disk when this returns.

    Args:
        checksums: compute their SHA-256 as they are written.

    Raises:
        SaveError: the disk refused a rank; on every rank alike.
    """
    writer = _Writer(directory, checksums=checksums)
    try:
        dcp.save(dict(state), storage_writer=writer, planner=_SavePlanner(), process_group=group)
    except CheckpointException as error:
        rank, cause = _first_failure(error)
        if isinstance(cause, OSError):
            raise SaveError(f"rank {rank}: {cause}") from None
        raise cause from error
    written = on_every_rank(lambda: _synced(directory, writer.digests), group=group)
    return {name: saved for of_rank in written for name, saved in of_rank.items()}


def load(state: State, directory: Path, *, group: distributed.ProcessGroup) -> None:
    """Fill what ``state`` holds; padding, of which no checkpoint knows, is left as it is.

    Raises:
        ValueError: the checkpoint lacks a tensor, or has it in another shape.
        OSError: the disk refused a rank; on every rank alike.
    """
    reader, planner = _Reader(directory), _LoadPlanner()
    try:
        dcp.load(dict(state), storage_reader=reader, planner=planner, process_group=group)
    except CheckpointException as error:
        rank, cause = _first_failure(error)
        if isinstance(cause, OSError):
            raise OSError(f"rank {rank} cannot read {directory}: {cause}") from error
        raise cause from error
    asked = sum(tensor.numel() for pieces in state.values() for tensor in pieces.held.values())
    assert planner.elements == asked, f"{directory}: {planner.elements} of {asked} elements are in the checkpoint"


def copy_of_own(state: State, *, group: distributed.ProcessGroup) -> dict[str, Pieces]:
    """What of ``state`` is for this rank to write, in host memory of its own. Collective."""
    planner, everyones = _SavePlanner(), [SavePlan([])] * group.size()
    planner.set_up_planner(dict(state), is_coordinator=True)
    distributed.all_gather_object(everyones, planner.create_local_plan(), group=group)
    plans, _ = planner.create_global_plan(everyones)
    held: dict[str, dict[torch.Size, Tensor]] = {key: {} for key in state}
    for item in plans[group.rank()].items:
        tensor = state[item.index.fqn].__get_tensor_shard__(item.index)
        assert item.index.offset is not None
        held[item.index.fqn][item.index.offset] = tensor.detach().to("cpu", copy=True).contiguous()
    return {key: Pieces(state[key].shape, of_key) for key, of_key in held.items()}


def _first_failure(error: CheckpointException) -> tuple[int, BaseException]:
    """(rank, what it raised)."""
    rank, (cause, _) = min(error.failures.items())
    return rank, cause


def _synced(directory: Path, digests: Mapping[str, str]) -> dict[str, SavedFile]:
    """This rank's files, which are on disk then."""
    rank = distributed.get_rank()
    paths: Iterable[Path] = directory.glob(f"__{rank}_*{filesystem.DEFAULT_SUFFIX}")
    for path in (own := [*paths, *([directory / DESCRIPTION_FILE] if rank == 0 else [])]):
        folder.sync(path)
    folder.sync(directory)
    return {f"{directory.name}/{path.name}": SavedFile(path.stat().st_size, digests.get(path.name)) for path in own}


class _SavePlanner(dcp.DefaultSavePlanner):
    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def lookup_object(self, index: metadata.MetadataIndex) -> Tensor:
        return _alone(self.state_dict[index.fqn].__get_tensor_shard__(index).detach())


class _LoadPlanner(dcp.DefaultLoadPlanner):
    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self.elements = 0

    def set_up_planner(self, state_dict: Any, metadata: Any = None, is_coordinator: bool = False) -> None:
        self.state_dict, self.metadata, self.is_coordinator = state_dict, metadata, is_coordinator

    def create_local_plan(self) -> LoadPlan:
        assert self.metadata is not None
        saved = self.metadata.state_dict_metadata
        missing = sorted(self.state_dict.keys() - saved.keys())
        if missing:
            raise ValueError(f"the checkpoint has no {', '.join(missing)}")
        for key, pieces in self.state_dict.items():
            if saved[key].size != pieces.shape:
                raise ValueError(f"{key} is {tuple(saved[key].size)} in the checkpoint and {tuple(pieces.shape)} here")
        return super().create_local_plan()

    def lookup_tensor(self, index: metadata.MetadataIndex) -> Tensor:
        return self.state_dict[index.fqn].__get_tensor_shard__(index)

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        self.elements += math.prod(read_item.lengths)


class _Writer(dcp.FileSystemWriter):
    """``digests``: name of each file that this rank has written -> its SHA-256, where checksums are wanted."""

    def __init__(self, directory: Path, *, checksums: bool) -> None:
        super().__init__(directory, sync_files=False, per_thread_copy_ahead=0)
        self.digests: dict[str, str] = {}
        if checksums:
            self.fs = _DigestingFiles(self.digests)

    def write_data(self, plan: SavePlan, planner: dcp.SavePlanner) -> Any:
        try:
            return super().write_data(plan, planner)
        except RuntimeError as error:  # with which torch.save covers what the disk said
            raise (error.__context__ if isinstance(error.__context__, OSError) else error) from None

    def storage_meta(self) -> None:
        """Nothing of when and where: the same state gives the same bytes."""


class _DigestingFiles(filesystem.FileSystem):
    """Knows the SHA-256 of every file that it has written, without reading one again."""

    def __init__(self, digests: dict[str, str]) -> None:
        self._digests = digests

    @contextmanager
    def create_stream(self, path: str | os.PathLike, mode: str) -> Iterator[io.IOBase]:
        assert mode == "wb", mode
        with ThreadPoolExecutor(1, thread_name_prefix="checksum") as pool:
            raw = _DigestedFile(path, mode, pool)
            with io.BufferedWriter(raw) as stream:
                yield stream
        self._digests[Path(path).name] = raw.digest.hexdigest()

    def rename(self, path: str | os.PathLike, new_path: str | os.PathLike) -> None:
        super().rename(path, new_path)
        self._digests[Path(new_path).name] = self._digests.pop(Path(path).name)


class _DigestedFile(io.FileIO):
    """A new file that is written from its beginning to its end. While the system takes a block, a thread sums it up."""

    def __init__(self, path: str | os.PathLike, mode: str, pool: ThreadPoolExecutor) -> None:
        super().__init__(path, mode)
        self.digest, self._pool = hashlib.sha256(), pool

    def write(self, data: Any, /) -> int:
        block = memoryview(data).cast("B")[:_BLOCK_BYTES]
        before = self.digest.copy()
        summing = self._pool.submit(self.digest.update, block)
        try:
            written = super().write(block)
        finally:
            summing.result()
        if written < len(block):
            before.update(block[:written])
            self.digest = before
        return written

    def seek(self, *arguments: Any) -> int:
        raise io.UnsupportedOperation("the bytes before would count twice")


class _Reader(dcp.FileSystemReader):
    """Raises UnpicklingError where ``.metadata`` describes other things than tensors."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        with (directory / DESCRIPTION_FILE).open("rb") as file:
            self._metadata = _MetadataUnpickler(file).load()
        kinds = {type(saved) for saved in self._metadata.state_dict_metadata.values()}
        if kinds - {metadata.TensorStorageMetadata}:  # others are pickles again
            raise pickle.UnpicklingError(f"{directory} holds other things than tensors")

    def read_metadata(self, *_: Any, **__: Any) -> metadata.Metadata:
        return self._metadata


class _MetadataUnpickler(pickle.Unpickler):
    """Of what describes tensors and where they lie; a pickle can name any function of any module."""

    def find_class(self, module: str, name: str) -> Any:
        found = super().find_class(module, name) if module in _DESCRIBING else None
        is_known = found in (torch.Size, torch.serialization._get_layout, filesystem._StorageInfo)
        is_metadata = isinstance(found, type) and found.__module__ == metadata.__name__
        if is_known or is_metadata or isinstance(found, torch.dtype):
            return found
        raise pickle.UnpicklingError(f"a description of tensors has no use for {module}.{name}")


def _alone(tensor: Tensor) -> Tensor:
    """The same memory as a storage of its own, if it is host memory."""
    if tensor.dim() == 0 or not tensor.is_cpu or not tensor.is_contiguous():
        return tensor
    return torch.from_numpy(tensor.view(torch.uint8).numpy()).view(tensor.dtype)
