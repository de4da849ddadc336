"""When a run saves: after steps that are due, when it is asked to stop, and before a step whose numbers are not finite
ends it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from trainer.checkpoint.state import Checkpoints
from trainer.measure.phases import Phases
from trainer.roles.role import Role
from trainer.training.finite import NotFinite


class StepSaver:
    """Saves the roles that are trained, with the steps of their ``schedules``; nothing without ``checkpoints``."""

    def __init__(
        self,
        checkpoints: Checkpoints | None,
        learners: Mapping[str, Role],
        *,
        schedules: Mapping[str, OptimizerParamScheduler],
        phases: Phases,
    ) -> None:
        self._checkpoints, self._learners = checkpoints, learners
        self._schedules, self._phases = schedules, phases

    def save_if_due(self, record: Mapping[str, Any], *, kl_coef: float) -> bool:
        """Save the step whose record has been written, if that is due or the job was asked to stop, which is returned.
        The seconds of saving count towards the next record."""
        if self._checkpoints is None:
            return False
        stops = self._checkpoints.stop_requested()
        if stops or self._checkpoints.is_due(record["step"]):
            self._save(record, schedule_steps=self._schedule_steps(), kl_coef=kl_coef)
        return stops

    @contextmanager
    def around_step_after(self, record: Mapping[str, Any], *, kl_coef: float) -> Iterator[None]:
        """Inside is the step after that of ``record``. Where its numbers are not finite, and no role has been trained
        in it, a job that saves checkpoints saves the step of ``record`` before it ends, if it has not."""
        schedule_steps, optimizer_steps = self._schedule_steps(), self._optimizer_steps()
        try:
            yield
        except NotFinite:
            is_unsaved = self._checkpoints is not None and self._checkpoints.lacks(record["step"])
            if is_unsaved and self._optimizer_steps() == optimizer_steps:
                self._save(record, schedule_steps=schedule_steps, kl_coef=kl_coef)
            raise

    def _save(self, record: Mapping[str, Any], *, schedule_steps: Mapping[str, int], kl_coef: float) -> None:
        assert self._checkpoints is not None
        step = record["step"]
        with self._phases.phase("checkpoint", step=step):
            self._checkpoints.save(
                self._learners, step=step, kl_coef=kl_coef, schedule_steps=schedule_steps, record=record
            )

    def _schedule_steps(self) -> dict[str, int]:
        return {name: schedule.num_steps for name, schedule in self._schedules.items()}

    def _optimizer_steps(self) -> dict[str, int]:
        return {name: role.model.step_count() for name, role in self._learners.items()}
