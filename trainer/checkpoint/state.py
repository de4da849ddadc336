"""What a checkpoint holds, and how roles are saved and restored.

    <role>_weights.safetensors           every tensor a forward pass reads, as the last step left it
    <role>_weights_<tag>.safetensors     further tags of the weights backuper (the reference model)
    <role>_weights[_<tag>].part_<n>.safetensors   where ranks share the model, the parts of the n-th of them
    <role>_optimizer_<rank>.safetensors  ``main/``, ``exp_avg/``, ``exp_avg_sq/`` + parameter name: this rank's share of
                                         the flattened parameter; the header says where in it the share starts

Random draws are keyed by (seed, purpose, step, rank), so no generator state is kept. Tensors are found by their name in
the whole model and by position (:mod:`.parts`), so a checkpoint can be loaded under other tensor, pipeline and data
parallel sizes, with or without the distributed optimizer, and under any memory policy. Simplifies megatron-core's
dist_checkpointing: one file per rank, saving blocks the run, and one role at a time passes through host memory.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import distributed

from trainer import optimizer as optimizers
from trainer.checkpoint import folder
from trainer.checkpoint.folder import Manifest
from trainer.checkpoint.parts import SavedWeights, fill_shares, header
from trainer.config import Config, to_plain
from trainer.distributed import data_parallel_rank, model_parallel_rank
from trainer.models.sharding import named_tensors, sharding_of
from trainer.role import Role

Roles = Mapping[str, Role]


class Checkpoints:
    """Saves the checkpoints of one run and restores the one that it goes on from. Every method is collective.

    Args:
        run_directory: checkpoints are saved in it.
        resume_from: a checkpoint of this or another run, or None to start anew.
        note: takes a line for the user when a save failed; the run goes on, since the checkpoint before is whole.
    """

    def __init__(
        self, config: Config, run_directory: Path, *, resume_from: Path | None, note: Callable[[str], None]
    ) -> None:
        self._config, self._folder = config, run_directory / folder.FOLDER
        self._resume_from, self._note = resume_from, note

    def is_due(self, step: int) -> bool:
        """Whether ``step`` ends with a checkpoint: every so many steps, and at the last one."""
        every = self._config.checkpoint.every_steps
        return every is not None and (step % every == 0 or step == self._config.algo.num_steps)

    def save(
        self, roles: Roles, *, step: int, kl_coef: float, schedule_steps: Mapping[str, int], record: Mapping[str, Any]
    ) -> None:
        """Save the roles, asleep or awake (they are asleep afterwards), unless the disk refuses."""
        try:
            temporary = _on_rank_0(lambda: folder.begin(self._folder, step))
            optimizer_steps, file_bytes = {}, {}
            for name, role in roles.items():
                with role.awake():
                    optimizer_steps[name] = _maximum(optimizers.step_count(role.optimizer))
                    for written in _on_every_rank(lambda role=role: _write(role, temporary)):
                        file_bytes |= written
            manifest = Manifest(
                step=step,
                kl_coef=kl_coef,
                schedule_steps=schedule_steps,
                optimizer_steps=optimizer_steps,
                record=record,
                config=to_plain(self._config),
                file_bytes=file_bytes,
            )
            keep_last = self._config.checkpoint.keep_last
            _on_rank_0(lambda: folder.commit(temporary, manifest, keep_last=keep_last))
        except _SaveError as error:
            self._note(f"no checkpoint of step {step}: {error}. The run goes on; the checkpoint before it is whole")
            _remove_quietly(self._folder)

    def restore(self, roles: Roles) -> Manifest | None:
        """Give the roles what ``resume_from`` holds (they are asleep afterwards); None, and no change, without one."""
        if self._resume_from is None:
            return None
        manifest = folder.read(self._resume_from)
        for name, role in roles.items():
            with role.awake():
                _read(role, self._resume_from, optimizer_step=manifest.optimizer_steps[name])
        return manifest


def _write(role: Role, directory: Path) -> dict[str, int]:
    """Write this rank's files of an awake role -> name and size of each, all on disk."""
    own = dict(named_tensors(role.chunks))
    shares = [share for share in optimizers.shares(role.optimizer, own) if not sharding_of(own[share.name]).is_copy]
    tensors = {f"{kind}/{share.name}": tensor for share in shares for kind, tensor in share.tensors.items()}
    starts = {share.name: share.start for share in shares}
    sizes = _save(directory / f"{role.name}_optimizer_{distributed.get_rank()}.safetensors", tensors, header(starts))
    sizes |= _save_weights(own, directory, name=f"{role.name}_weights", own=own)
    for tag in _further_tags(role):
        assert role.backuper is not None
        sizes |= _save_weights(role.backuper.get(tag), directory, name=f"{role.name}_weights_{tag}", own=own)
    return sizes


def _save_weights(
    weights: Mapping[str, torch.Tensor], directory: Path, *, name: str, own: Mapping[str, torch.Tensor]
) -> dict[str, int]:
    """The first of the data-parallel ranks, which all hold the same, writes its part of the model."""
    if data_parallel_rank() > 0:
        return {}
    part = model_parallel_rank()
    file = f"{name}.safetensors" if part == 0 else f"{name}.part_{part}.safetensors"
    kept = {name: tensor for name, tensor in weights.items() if not sharding_of(own[name]).is_copy}
    return _save(directory / file, kept, header())


def _saved_weights(checkpoint: Path, name: str, *, own: Mapping[str, torch.Tensor]) -> SavedWeights:
    """This rank's tensors out of what all ranks saved under ``name``."""
    files = [checkpoint / f"{name}.safetensors", *checkpoint.glob(f"{name}.part_*.safetensors")]
    weights = SavedWeights(files, own=own)
    assert weights.keys() == own.keys(), f"{checkpoint}/{name} and the model differ in {weights.keys() ^ own.keys()}"
    return weights


def _further_tags(role: Role) -> list[str]:
    return [tag for tag in role.backuper.backup_tags if tag != role.name] if role.backuper else []


def _save(path: Path, tensors: Mapping[str, torch.Tensor], metadata: dict[str, str]) -> dict[str, int]:
    save_file({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}, path, metadata)
    folder.sync(path)
    return {path.name: path.stat().st_size}


def _read(role: Role, checkpoint: Path, *, optimizer_step: int) -> None:
    """Load an awake role: the weights first, whose loading makes fp32 main params of them, then the saved state."""
    own = dict(named_tensors(role.chunks))
    role.load_weights(_saved_weights(checkpoint, f"{role.name}_weights", own=own))
    files = sorted(checkpoint.glob(f"{role.name}_optimizer_*.safetensors"))
    fill_shares(optimizers.shares(role.optimizer, own), files, own=own)
    optimizers.set_step_count(role.optimizer, optimizer_step)
    prefix = f"{role.name}_weights_"
    for path in sorted(checkpoint.glob(f"{prefix}*.safetensors")):
        if ".part_" not in path.name:
            assert role.backuper is not None
            role.backuper.put(path.stem.removeprefix(prefix), _saved_weights(checkpoint, path.stem, own=own))


class _SaveError(Exception):
    """A rank could not write; raised on all ranks alike."""


def _on_every_rank(action: Callable[[], Any]) -> list[Any]:
    """The results of all ranks. Raises _SaveError on every rank if the disk refused one of them."""
    result = error = None
    try:
        result = action()
    except (OSError, SafetensorError) as cause:
        error = f"rank {distributed.get_rank()}: {cause}"
    outcomes: list[Any] = [None] * distributed.get_world_size()
    distributed.all_gather_object(outcomes, (result, error))
    for _, failure in outcomes:
        if failure is not None:
            raise _SaveError(failure)
    return [outcome for outcome, _ in outcomes]


def _on_rank_0(action: Callable[[], Any]) -> Any:
    return _on_every_rank(lambda: action() if distributed.get_rank() == 0 else None)[0]


def _maximum(count: int) -> int:
    """Over the ranks: an optimizer without parameters on its rank need not count."""
    return max(_on_every_rank(lambda: count))


def _remove_quietly(path: Path) -> None:
    if distributed.get_rank() == 0:
        with suppress(OSError):  # the next save or start removes them
            folder.remove_leftovers(path)
