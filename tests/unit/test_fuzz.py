"""A sample of ``tests/scripts/fuzz_config.py``: a command is planned, or refused with a clear error."""

import random

import pytest

from tests.helpers import config_cases
from tests.helpers.config_cases import BASES, all_cases, mixed_cases, outcome

SEED, SINGLE, MIXED = 20261201, 18, 4


def test_bad_and_extreme_values_are_refused_clearly_or_planned():
    sample = random.Random(SEED).sample([*all_cases(BASES[:1])], SINGLE)
    sample += mixed_cases(MIXED, seed=SEED, bases=BASES[:1])
    outcomes = {case: outcome(base, case) for base, case in sample}
    wrong = {case: found for case, found in outcomes.items() if found not in ("accepted", "refused")}
    assert wrong == {}
    assert set(outcomes.values()) == {"accepted", "refused"}


@pytest.mark.parametrize(
    ("fault", "found"),
    [
        (AttributeError("'NoneType' object has no attribute 'get'"), "no clear error: AttributeError"),
        (ValueError("must be between 1 and 9"), "names no setting: ValueError"),
        (ValueError("algo.epochs=0: must be between 1 and 9"), "refused"),
    ],
)
def test_the_fuzz_tells_clear_errors_from_others(fault, found, monkeypatch):
    def fail(config):
        raise fault

    monkeypatch.setattr(config_cases.configuration, "to_config", fail)
    assert outcome(BASES[0], ("algo.epochs=0",)).startswith(found)
