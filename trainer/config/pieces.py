"""The parts of a run that the config names with ``_target_``."""

from __future__ import annotations

from hydra.utils import get_class

from trainer.algo.estimators import AdvantageEstimator
from trainer.config.schema import Config
from trainer.tasks import Task


def piece_classes(config: Config) -> dict[str, type]:
    """Section -> the class that it names."""
    return {section: get_class(getattr(config, section)["_target_"]) for section in ("task", "advantages")}


def make_task(config: Config) -> Task:
    """The run's task (cheap, torch-free)."""
    settings = dict(config.task)
    return get_class(settings.pop("_target_"))(**settings)


def make_estimator(config: Config) -> AdvantageEstimator:
    """The run's advantage estimator."""
    settings = dict(config.advantages)
    return get_class(settings.pop("_target_"))(**settings)
