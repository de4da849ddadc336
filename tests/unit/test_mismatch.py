"""Importance weights of what the engine drew, by hand; how far it is from training, measured."""

import math

import pytest
import torch

from tests.helpers.composing import GROUPS, config_of
from tests.helpers.roles import credited, make_batch, one_thread_world
from trainer.algo.mismatch import ImportanceWeights
from trainer.config.pieces import make_correction
from trainer.measure import metrics

NAN = math.nan
MASK = torch.tensor([[True, True, False], [True, True, True]])
# Ratios: 4 and 0.5 (product 2, geometric mean 2^0.5); 1, 0.25 and 0.5 (product 1/8, geometric mean 1/2).
RATIOS = torch.tensor([[4.0, 0.5, NAN], [1.0, 0.25, 0.5]])
PLAIN = ("advantages.gamma=1", "advantages.lam=1", "algo.whiten_advantages=false", "algo.centre_scores=false")


def weights(**changes):
    fields = {"level": "token", "lower": 0.4, "upper": 2.0, "outside": "truncate", "weigh": True, "reject_below": None}
    return ImportanceWeights(**{**fields, **changes}).weights(RATIOS.log(), response_mask=MASK).tolist()


def test_weights_by_hand():
    close = lambda rows: [pytest.approx(row) for row in rows]  # noqa: E731
    assert weights() == close([[2.0, 0.5, 0.0], [1.0, 0.4, 0.5]])
    assert weights(outside="mask") == close([[0.0, 0.5, 0.0], [1.0, 0.0, 0.5]])
    assert weights(outside="mask", weigh=False) == close([[0.0, 1.0, 0.0], [1.0, 0.0, 1.0]])
    assert weights(level="sequence") == close([[2.0, 2.0, 0.0], [0.4] * 3])
    assert weights(level="sequence", lower=0.1) == close([[2.0, 2.0, 0.0], [0.125] * 3])
    assert weights(level="sequence", outside="mask", upper=2.1) == close([[2.0, 2.0, 0.0], [0.0] * 3])
    assert weights(level="geometric") == close([[2**0.5] * 2 + [0.0], [0.5] * 3])
    assert weights(reject_below=0.3) == close([[2.0, 0.5, 0.0], [0.0] * 3])
    assert weights(reject_below=0.2) == close([[2.0, 0.5, 0.0], [1.0, 0.4, 0.5]])


def test_ratios_that_overflow_stay_finite():
    huge = torch.tensor([[800.0, -800.0, NAN], [0.0, 0.0, 0.0]])
    for level in ("token", "sequence", "geometric"):
        correction = ImportanceWeights(level, 0.0, 1e9, "truncate", True, None)
        assert correction.weights(huge, response_mask=MASK).isfinite().all()


@pytest.mark.parametrize("name", GROUPS["mismatch"])
def test_where_both_agree_no_correction_changes_anything(name):
    found = make_correction(config_of(f"mismatch={name}")).weights(torch.zeros(2, 3), response_mask=MASK)
    assert (found is None) == (name == "none")
    assert found is None or torch.equal(found, MASK.float())


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["mismatch.level=word"], "mismatch.level=word: must be one of token, sequence, geometric"),
        (["mismatch.outside=drop"], "mismatch.outside=drop: must be one of truncate, mask"),
        (["mismatch.upper=0.5"], "mismatch.upper=0.5: 1, the weight where both agree, must lie between"),
        (["mismatch.lower=-1"], "mismatch.lower=-1.0 and"),
        (["mismatch.upper=nan"], "mismatch.upper=nan"),
        (["mismatch.weigh=false"], "mismatch.weigh=false with mismatch.outside=truncate"),
        (["mismatch.reject_below=1"], "mismatch.reject_below=1.0: must be null, or at least 0"),
    ],
)
def test_bad_settings_are_refused(overrides, message):
    with pytest.raises(ValueError, match=message):
        config_of("mismatch=token_truncated", *overrides)


def batch_of(ratios, **given):
    """Responses of 2 and 3 tokens whose training and engine probabilities have these ratios."""
    batch = make_batch([2, 3], **given)
    mask = batch.response_mask
    log_ratio = torch.zeros(mask.shape)
    log_ratio[mask] = torch.tensor(ratios).log()
    return make_batch([2, 3], engine_log_probs=batch.old_log_probs - log_ratio, **given)


def test_advantages_are_weighed_and_what_is_measured_is_the_engine():
    ratios = [4.0, 0.5, 1.0, 0.25, 0.5]
    with one_thread_world():
        batch = batch_of(ratios, scores=torch.tensor([1.0, -1.0]))
        values = torch.zeros(2, batch.tokens.shape[1])
        plain = credited(batch, values, *PLAIN)
        result = credited(batch, values, *PLAIN, "mismatch=token_masked")  # within 0.5 and 5
        measured, before = (metrics.of_rollout(x) for x in (result, plain))
    mask = batch.response_mask
    assert plain.advantages[mask].tolist() == pytest.approx([1.0, 1.0, -1.0, -1.0, -1.0])
    assert result.advantages[mask].tolist() == pytest.approx([4.0, 0.5, -1.0, 0.0, -0.5], rel=1e-4)
    assert torch.equal(result.estimated_advantages, plain.advantages)
    assert torch.equal(result.returns, plain.returns)  # the critic learns what it would without
    assert measured["mismatch/ratio"] == pytest.approx(6.25 / 5, rel=1e-5)
    assert measured["mismatch/ratio_max"] == measured["mismatch/ratio_p99"] == pytest.approx(4.0, rel=1e-5)
    assert measured["mismatch/effective_sample_size"] == pytest.approx(6.25**2 / (5 * 17.5625), rel=1e-5)
    assert measured["mismatch/masked_fraction"] == pytest.approx(1 / 5)
    assert before["mismatch/masked_fraction"] == 0
    assert before["mismatch/ratio_max"] == measured["mismatch/ratio_max"]


def test_the_99th_percentile_is_the_hundredth_part_from_above():
    with one_thread_world():
        batch = make_batch([200])
        log_ratio = torch.zeros(batch.response_mask.shape)
        log_ratio[batch.response_mask] = torch.arange(1.0, 201.0).log()
        batch = make_batch([200], engine_log_probs=batch.old_log_probs - log_ratio)
        found = metrics.mismatch(credited(batch, torch.zeros(batch.tokens.shape), *PLAIN))
    assert found["mismatch/ratio_p99"] == pytest.approx(198, rel=1e-4)
    assert found["mismatch/ratio_max"] == pytest.approx(200, rel=1e-4)
