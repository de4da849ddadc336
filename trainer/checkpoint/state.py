"""What a checkpoint holds, and how roles are saved and restored.

    <role>_weights.safetensors           every tensor a forward pass reads, as the last step left it
    <role>_weights_<tag>.safetensors     further tags of the weights backuper (the reference model)
    <role>_weights[_<tag>].rank_<n>.safetensors   where ranks share the model, the parts of rank n
    <role>_optimizer_<rank>.safetensors  ``main/``, ``exp_avg/``, ``exp_avg_sq/`` + parameter name: this rank's share of
                                         the flattened parameter; the header says where in it the share starts
    tokenizer/                           the run's tokenizer, a Hugging Face folder

Random draws are keyed by (seed, purpose, step, rank), so no generator state is kept. Tensors are found by their name in
the whole model and by position (:mod:`.parts`), so a checkpoint can be loaded under other tensor, pipeline, data and
expert parallel sizes, with or without the distributed optimizer, and under any memory policy. Simplifies Megatron's
dist_checkpointing: one file per rank. Saving blocks the run while one role at a time is written; with
``checkpoint.async_save`` it blocks while all of them are copied to host memory.
"""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from megatron.core import parallel_state
from torch import Tensor, distributed

from trainer import optimizer as optimizers
from trainer.checkpoint import folder
from trainer.checkpoint.folder import Manifest
from trainer.checkpoint.parts import SavedWeights, fill_shares, header
from trainer.checkpoint.writing import BackgroundWriter, File, SaveError, on_every_rank, on_rank_0, write_bytes
from trainer.config import Config, to_plain
from trainer.distributed import data_parallel_rank
from trainer.models.moe import is_expert
from trainer.models.sharding import named_tensors, sharding_of
from trainer.preemption import STOP_FILE
from trainer.role import Role

Roles = Mapping[str, Role]


class Checkpoints:
    """Saves the checkpoints of one run and restores the one that it goes on from. Every method is collective.

    Args:
        run_directory: checkpoints are saved in it.
        resume_from: a checkpoint of this or another run, or None to start anew.
        tokenizer: a Hugging Face tokenizer, saved with every checkpoint.
        note: takes a line for the user when a save failed; the run goes on, since the checkpoint before is whole.
    """

    def __init__(
        self,
        config: Config,
        run_directory: Path,
        *,
        resume_from: Path | None,
        tokenizer: Any,
        note: Callable[[str], None],
    ) -> None:
        self._config, self._folder = config, run_directory / folder.FOLDER
        self._stop_file = run_directory / STOP_FILE
        self._resume_from, self._note = resume_from, note
        self._tokenizer = tokenizer
        self._writer = BackgroundWriter() if config.checkpoint.async_save else None
        self._step_under_way = 0

    def is_due(self, step: int) -> bool:
        """Whether ``step`` ends with a checkpoint: every so many steps, and at the last one."""
        every = self._config.checkpoint.every_steps
        return every is not None and (step % every == 0 or step == self._config.algo.num_steps)

    def needs_accuracy(self, step: int) -> bool:
        """Whether the record of ``step`` must hold the held-out accuracy, by which checkpoints are compared."""
        return self._config.checkpoint.keep_best and self.is_due(step)

    def stop_requested(self) -> bool:
        """Whether a job that saves checkpoints is asked to end after this step."""
        return self._config.checkpoint.every_steps is not None and on_rank_0(self._stop_file.exists)

    def save(
        self, roles: Roles, *, step: int, kl_coef: float, schedule_steps: Mapping[str, int], record: Mapping[str, Any]
    ) -> None:
        """Save the roles, asleep or awake (they are asleep afterwards), unless the disk refuses.

        With ``checkpoint.async_save`` this returns once host memory holds a copy, after the save before has ended;
        whether the disk takes it is known at the next save, or from :meth:`finish`.
        """
        self.finish()
        manifest = Manifest(
            step=step,
            kl_coef=kl_coef,
            schedule_steps=schedule_steps,
            optimizer_steps={name: _maximum(optimizers.step_count(role.optimizer)) for name, role in roles.items()},
            record=record,
            config=to_plain(self._config),
            file_bytes={},
        )
        if self._writer is None:
            with closing(_files(roles)) as files, self._noting_errors(step):
                self._write(manifest, files, self._tokenizer_files, group=None)
            return
        copies = [[file.in_host_memory() for file in of_role] for of_role in _files(roles)]
        group, tokenizer_files = self._writer.group, self._tokenizer_files
        self._step_under_way = step
        self._writer.start(lambda: self._write(manifest, copies, tokenizer_files, group=group))

    def finish(self) -> None:
        """Wait until the save that is under way, if any, has ended."""
        if self._writer is not None:
            with self._noting_errors(self._step_under_way):
                self._writer.finish()

    @contextmanager
    def finishing(self) -> Iterator[None]:
        """Inside is the run; afterwards no save is under way. A step that was saved is not lost because a later one
        fails: then it is written all the same, and the run's error is the one that is raised."""
        try:
            yield
        except Exception:
            with suppress(Exception):
                self.finish()
            raise
        self.finish()

    def restore(self, roles: Roles) -> Manifest | None:
        """Give the roles what ``resume_from`` holds (they are asleep afterwards); None, and no change, without one."""
        if self._resume_from is None:
            return None
        manifest = folder.read(self._resume_from)
        for name, role in roles.items():
            with role.awake():
                _read(role, self._resume_from, optimizer_step=manifest.optimizer_steps[name])
        return manifest

    def _write(
        self, manifest: Manifest, files: Iterable[list[File]], tokenizer_files: Mapping[str, bytes], *, group: Any
    ) -> None:
        """Write all ranks' files and make them a checkpoint; touches no device. Raises SaveError on every rank."""
        settings = self._config.checkpoint
        try:
            temporary = on_rank_0(lambda: folder.begin(self._folder, manifest.step), group=group)
            sizes = on_rank_0(lambda: write_bytes(temporary, tokenizer_files), group=group)
            for of_role in files:
                written = on_every_rank(lambda of_role=of_role: [f.write(temporary) for f in of_role], group=group)
                sizes |= {name: size for of_rank in written for file in of_rank for name, size in file.items()}
            whole = replace(manifest, file_bytes=sizes)
            keep_last, keep_best = settings.keep_last, settings.keep_best
            on_rank_0(lambda: folder.commit(temporary, whole, keep_last=keep_last, keep_best=keep_best), group=group)
        except SaveError:
            if distributed.get_rank() == 0:
                with suppress(OSError):  # the next save or start removes them
                    folder.remove_leftovers(self._folder)
            raise

    @contextmanager
    def _noting_errors(self, step: int) -> Iterator[None]:
        try:
            yield
        except SaveError as error:
            self._note(f"no checkpoint of step {step}: {error}. The run goes on; the checkpoint before it is whole")

    @functools.cached_property
    def _tokenizer_files(self) -> Mapping[str, bytes]:
        """Name -> content on rank 0, nothing elsewhere. Of the main thread: a tokenizer in use must not be saved."""
        if distributed.get_rank() != 0:
            return {}
        with tempfile.TemporaryDirectory() as temporary:
            self._tokenizer.save_pretrained(temporary)
            paths = [path for path in sorted(Path(temporary).rglob("*")) if path.is_file()]
            return {f"tokenizer/{path.relative_to(temporary)}": path.read_bytes() for path in paths}


def _files(roles: Roles) -> Generator[list[File], None, None]:
    """This rank's files of each role, whose tensors may be read until the next role's are asked for; it is asleep then.

    Collective, since ranks may share weights.
    """
    for role in roles.values():
        with role.readable() as (weights, shares):
            own = dict(named_tensors(role.chunks))
            shares = [share for share in shares if not sharding_of(own[share.name]).is_copy]
            tensors = {f"{kind}/{share.name}": tensor for share in shares for kind, tensor in share.tensors.items()}
            starts = {share.name: share.start for share in shares}
            sets = {"": weights}
            for tag in _further_tags(role):
                assert role.backuper is not None
                sets[f"_{tag}"] = role.backuper.get(tag)
            of_weights = [_weights_file(f"{role.name}_weights{tag}", found, own=own) for tag, found in sets.items()]
            yield [
                File(f"{role.name}_optimizer_{distributed.get_rank()}.safetensors", tensors, header(starts)),
                *(file for file in of_weights if file.tensors),
            ]


def _weights_file(name: str, weights: Mapping[str, Tensor], *, own: Mapping[str, Tensor]) -> File:
    """What this rank writes of ``weights``: its parts, unless ranks before it hold the same. Collective."""
    rank = distributed.get_rank()
    file = f"{name}.safetensors" if rank == 0 else f"{name}.rank_{rank}.safetensors"
    kept = {key: tensor for key, tensor in weights.items() if _is_writer(key) and not sharding_of(own[key]).is_copy}
    return File(file, kept, header())


def _is_writer(name: str) -> bool:
    """Whether this is the first of the data-parallel ranks that hold the tensor."""
    return (parallel_state.get_expert_data_parallel_rank() if is_expert(name) else data_parallel_rank()) == 0


def _saved_weights(checkpoint: Path, name: str, *, own: Mapping[str, Tensor]) -> SavedWeights:
    """This rank's tensors out of what all ranks saved under ``name``."""
    files = [checkpoint / f"{name}.safetensors", *checkpoint.glob(f"{name}.rank_*.safetensors")]
    weights = SavedWeights(files, own=own)
    assert weights.keys() == own.keys(), f"{checkpoint}/{name} and the model differ in {weights.keys() ^ own.keys()}"
    return weights


def _further_tags(role: Role) -> list[str]:
    return [tag for tag in role.backuper.backup_tags if tag != role.name] if role.backuper else []


def _read(role: Role, checkpoint: Path, *, optimizer_step: int) -> None:
    """Load an awake role: the weights first, whose loading makes fp32 main params of them, then the saved state."""
    own = dict(named_tensors(role.chunks))
    role.load_weights(_saved_weights(checkpoint, f"{role.name}_weights", own=own))
    files = sorted(checkpoint.glob(f"{role.name}_optimizer_*.safetensors"))
    fill_shares(optimizers.shares(role.optimizer, own), files, own=own)
    optimizers.set_step_count(role.optimizer, optimizer_step)
    prefix = f"{role.name}_weights_"
    for path in sorted(checkpoint.glob(f"{prefix}*.safetensors")):
        if "." not in path.stem:
            assert role.backuper is not None
            role.backuper.put(path.stem.removeprefix(prefix), _saved_weights(checkpoint, path.stem, own=own))


def _maximum(count: int) -> int:
    """Over the ranks: an optimizer without parameters on its rank need not count."""
    return max(on_every_rank(lambda: count))
