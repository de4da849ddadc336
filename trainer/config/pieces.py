"""The parts of a run that the config names with ``_target_``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hydra.utils import get_class

from trainer.algo.estimators import AdvantageEstimator
from trainer.algo.mismatch import Correction
from trainer.algo.policy_losses import PolicyLoss
from trainer.config.schema import Config
from trainer.tasks import Environment

PIECES = ("task", "advantages", "policy_loss", "mismatch")  # sections that name a class


def piece_classes(config: Config) -> dict[str, type]:
    """Section -> the class that it names."""
    return {section: get_class(getattr(config, section)["_target_"]) for section in PIECES}


def make_task(config: Config) -> Environment:
    """The run's task, or environment of several turns (cheap, torch-free)."""
    return _made(config.task)


def make_estimator(config: Config) -> AdvantageEstimator:
    """The run's advantage estimator."""
    return _made(config.advantages)


def make_policy_loss(config: Config) -> PolicyLoss:
    """What the run's actor minimises."""
    return _made(config.policy_loss)


def make_correction(config: Config) -> Correction:
    """What the run does about an engine that draws otherwise than training computes."""
    return _made(config.mismatch)


def _made(section: Mapping[str, Any]) -> Any:
    settings = dict(section)
    return get_class(settings.pop("_target_"))(**settings)
