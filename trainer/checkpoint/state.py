"""What a checkpoint holds, and how roles are saved and restored.

    <role>/      a folder of torch.distributed.checkpoint (DCP, :mod:`.storage`) with these tensors:
                 ``weights/<name>``      what a forward pass reads, as the last step left it
                 ``<tag>/<name>``        further tags of the weights backuper (``ref``, the reference model)
                 ``main/<name>``, ``exp_avg/<name>``, ``exp_avg_sq/<name>``   fp32 main params and Adam's moments
    tokenizer/   the run's tokenizer, a Hugging Face folder

Random draws are keyed by (seed, purpose, step, rank), so no generator state is kept. Names and shapes are those of the
whole model (:mod:`.pieces`), so a checkpoint can be loaded under other tensor, pipeline, context, data and expert
parallel sizes, with or without the distributed optimizer, and under any memory policy. Saving blocks the run while one
role at a time is written; with ``checkpoint.async_save`` it blocks while all of them are copied to host memory. DCP's
``async_save`` would need all roles awake at once and copy what other ranks write; here each rank copies what is its own
to write, role by role, and a thread hands the copies to DCP.
"""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import distributed

from trainer.checkpoint import folder, storage
from trainer.checkpoint.manifest import Manifest
from trainer.checkpoint.pieces import pieces_of
from trainer.checkpoint.preemption import STOP_FILE
from trainer.checkpoint.storage import State
from trainer.checkpoint.writing import (
    BackgroundWriter,
    SaveError,
    group_of_writers,
    on_every_rank,
    on_rank_0,
    write_bytes,
)
from trainer.config.identity import to_plain
from trainer.config.schema import Config
from trainer.megatron.sharding import Share, sharding_of
from trainer.roles.role import Role

Roles = Mapping[str, Role]  # that are trained: others have their folder


class Checkpoints:
    """Saves the checkpoints of one run and restores the one that it goes on from. Every method is collective.

    Args:
        run_directory: checkpoints are saved in it.
        resume_from: a checkpoint of this or another run, or None to start anew.
        tokenizer: a Hugging Face tokenizer, saved with every checkpoint.
        questions: digest of the run's examples.
        note: takes a line for the user when a save failed; the run goes on, since the checkpoint before is whole.
    """

    def __init__(
        self,
        config: Config,
        run_directory: Path,
        *,
        resume_from: Path | None,
        tokenizer: Any,
        questions: str,
        note: Callable[[str], None],
    ) -> None:
        self._config, self._folder = config, run_directory / folder.FOLDER
        self._stop_file = run_directory / STOP_FILE
        self._resume_from, self._note = resume_from, note
        self._tokenizer, self._questions = tokenizer, questions
        self._group = group_of_writers()
        self._writer = BackgroundWriter() if config.checkpoint.async_save else None
        self._step_under_way = 0

    def is_due(self, step: int) -> bool:
        """Whether ``step`` ends with a checkpoint: every so many steps, and at the last one."""
        every = self._config.checkpoint.every_steps
        return every is not None and (step % every == 0 or step == self._config.algo.num_steps)

    def lacks(self, step: int) -> bool:
        """Whether a job that saves checkpoints has none of ``step`` that it was to save."""
        return self._config.checkpoint.every_steps is not None and not self.is_due(step)

    def needs_accuracy(self, step: int) -> bool:
        """Whether the record of ``step`` must hold the held-out accuracy, by which checkpoints are compared."""
        return self._config.checkpoint.keep_best and self.is_due(step)

    def stop_requested(self) -> bool:
        """Whether a job that saves checkpoints is asked to end after this step. Through the default group: another
        may be in use by a save in the background."""
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
            optimizer_steps={name: self._maximum(role.model.step_count()) for name, role in roles.items()},
            tags={name: role.further_tags for name, role in roles.items()},
            record=record,
            config=to_plain(self._config),
            questions=self._questions,
            files={},
        )
        with self._noting_errors(step):
            on_rank_0(lambda: bool(self._tokenizer_files), group=self._group)
            if self._writer is None:
                with closing(_states(roles)) as states:
                    self._write(manifest, states)
                return
            copies = [(name, storage.copy_of_own(state, group=self._group)) for name, state in _states(roles)]
            self._step_under_way = step
            self._writer.start(lambda: self._write(manifest, copies))

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
                tags = [tag for tag in manifest.tags[name] if tag in (role.spec.tags or ())]
                with role.overwriting(tags=tags) as shares:
                    for share in shares:
                        for tensor in share.tensors.values():
                            tensor.zero_()  # padding, which no checkpoint holds, stays so
                    storage.load(_state(role, shares), self._resume_from / name, group=self._group)
                role.model.set_step_count(manifest.optimizer_steps[name])
        return manifest

    def _write(self, manifest: Manifest, states: Iterable[tuple[str, State]]) -> None:
        """Write all ranks' files and make them a checkpoint. Raises SaveError on every rank."""
        settings, group = self._config.checkpoint, self._group
        try:
            temporary = on_rank_0(lambda: folder.begin(self._folder, manifest.step), group=group)
            checksums = settings.checksums
            files = on_rank_0(lambda: write_bytes(temporary, self._tokenizer_files, checksums=checksums), group=group)
            for name, state in states:
                files |= storage.save(state, temporary / name, group=group, checksums=checksums)
            whole = replace(manifest, files=files)
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

    def _maximum(self, count: int) -> int:
        """Over the ranks: an optimizer without parameters on its rank need not count."""
        return max(on_every_rank(lambda: count, group=self._group))

    @functools.cached_property
    def _tokenizer_files(self) -> Mapping[str, bytes]:
        """Name -> content on rank 0, nothing elsewhere. Of the main thread: a tokenizer in use must not be saved."""
        if distributed.get_rank() != 0:
            return {}
        with tempfile.TemporaryDirectory() as temporary:
            self._tokenizer.save_pretrained(temporary)
            paths = [path for path in sorted(Path(temporary).rglob("*")) if path.is_file()]
            return {f"tokenizer/{path.relative_to(temporary)}": path.read_bytes() for path in paths}


def _states(roles: Roles) -> Generator[tuple[str, State], None, None]:
    """Each role's name and what this rank can write of it, whose tensors may be read until the next role's are asked
    for; it is asleep then. Collective, since ranks may share weights."""
    for role in roles.values():
        with role.readable() as shares:
            yield role.name, _state(role, shares, copies=False)


def _state(role: Role, shares: Iterable[Share], *, copies: bool = True) -> State:
    """Key in the checkpoint -> this rank's pieces. ``copies``: of tensors that another pipeline stage has too, which
    may cut them otherwise."""
    own = role.model.tensors()
    return {
        f"{kind}/{share.name}": pieces_of(share, kind, model_tensor=own[share.name])
        for share in shares
        if copies or not sharding_of(own[share.name]).is_copy
        for kind in share.tensors
    }
