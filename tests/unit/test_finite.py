"""When training stops being any."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from tests.helpers.roles import make_batch, small_config
from trainer.algo.estimators import AdvantageEstimator, Estimate, ScoredResponses
from trainer.algo.mismatch import Correction, Uncorrected
from trainer.data.batch import RolloutBatch
from trainer.training.experience import Credit, Judgement, experience_of
from trainer.training.finite import NotFinite, require_progress


@dataclass(frozen=True)
class OverTheDeviation(AdvantageEstimator):
    """Forgets that scores may all be equal."""

    def estimate(self, experience: ScoredResponses) -> Estimate:
        return Estimate(experience.on_every_token(experience.scores / experience.scores.std()))


@dataclass(frozen=True)
class Unbounded(Correction):
    def weights(self, log_ratio: Tensor, *, response_mask: Tensor) -> Tensor:
        return (1000 * log_ratio).exp()


def experience_with(estimator, correction, **given):
    config = small_config("algo=grpo")
    batch = make_batch([2, 3], **given)
    drawn = RolloutBatch(**{field.name: getattr(batch, field.name) for field in dataclasses.fields(RolloutBatch)})
    judged = Judgement(batch.ref_log_probs, batch.old_log_probs, batch.entropy, None)
    return experience_of(drawn, judged, settings=config.algo, credit=Credit(estimator, correction), kl_coef=0.0)


def test_advantages_that_are_not_finite_are_the_estimators(world):
    with pytest.raises(
        NotFinite, match=r"advantages: advantages\._target_=.*OverTheDeviation gave 5 numbers that are NaN"
    ):
        experience_with(OverTheDeviation(), Uncorrected(), scores=torch.ones(2))
    experience = experience_with(OverTheDeviation(), Uncorrected(), scores=torch.tensor([0.0, 1.0]))
    assert experience.advantages.isfinite().all()


def test_importance_weights_that_are_not_finite_are_the_corrections(world):
    shape = make_batch([2, 3]).response_mask.shape
    scores = torch.tensor([0.0, 1.0])
    with pytest.raises(NotFinite, match=r"mismatch\._target_=.*Unbounded gave 5 numbers"):
        experience_with(OverTheDeviation(), Unbounded(), scores=scores, engine_log_probs=torch.full(shape, -5.0))
    experience_with(OverTheDeviation(), Unbounded(), scores=scores)


def test_a_piece_that_is_given_nan_is_not_to_blame(world):
    experience = experience_with(OverTheDeviation(), Uncorrected(), scores=torch.tensor([torch.nan, 1.0]))
    assert experience.advantages.isnan().any()


def test_one_step_without_an_optimizer_step_is_a_spike_and_two_are_the_end():
    good, bad = ({"step": step, "actor/skipped_steps": skipped} for step, skipped in ((3, 1.0), (4, 2.0)))
    again = bad | {"step": 5}
    for records in ((good, bad), (bad, good), (bad, {"step": 5}), ({"step": 0}, bad)):  # the actor may wait
        require_progress(records, "actor", optimizer_steps=2)
    require_progress((bad, again), "critic", optimizer_steps=2)
    with pytest.raises(NotFinite, match=r"steps 4, 5, train_actor: every optimizer step was skipped"):
        require_progress((bad, again), "actor", optimizer_steps=2)
