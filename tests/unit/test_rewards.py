"""What may be a reward, and that whatever pays is tried before a run is built."""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass
from fractions import Fraction

import numpy
import pytest
import torch

from tests.helpers.composing import config_of
from trainer.config.pieces import make_task
from trainer.data.rewards import Payer, check_rewards, reply_to
from trainer.tasks import Example, ResponseInfo
from trainer.tasks.arithmetic import ArithmeticTask
from trainer.tasks.verifiers import RewardError, as_reward, verify

EXAMPLE = Example("1 + 1 =", "2")


def paid(config, task, response, payer):
    return reply_to(config, task, [response], EXAMPLE, ResponseInfo(1, truncated=False), payer=payer).reward


@pytest.mark.parametrize(
    "value",
    [
        *(0.5, "0.5", Fraction(1, 2), numpy.float32(0.5), numpy.float64(0.5), numpy.array(0.5)),
        *(torch.tensor(0.5), torch.tensor([0.5]), torch.tensor(0.5, dtype=torch.bfloat16)),
    ],
    ids=lambda value: f"{type(value).__name__}-{value}",
)
def test_what_float_takes_is_a_reward(value):
    paid = as_reward(value, source="reward=f", response="x")
    assert (type(paid), paid) == (float, 0.5)


def test_whole_numbers_and_truth_values_are_rewards():
    values = (3, True, numpy.int64(3), numpy.bool_(True), torch.tensor(3))
    assert [as_reward(value, source="reward=f", response="x") for value in values] == [3.0, 1.0, 3.0, 1.0, 3.0]


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (math.nan, "reward=f returned nan for 'x': rewards are finite"),
        (torch.tensor(math.inf), r"returned tensor\(inf\) for 'x': rewards are finite"),
        (1e300, r"returned 1e\+300 for 'x': rewards are finite numbers \(in float32\)"),
        (-(10**400), "returned -1000"),
        (None, "returned None for 'x', which is no number"),
        ("much", "returned 'much' for 'x', which is no number"),
        ([1.0], r"returned \[1.0\] for 'x', which is no number"),
        (torch.zeros(2), r"returned tensor\(\[0., 0.\]\) for 'x', which is no number"),
        (1j, "returned 1j for 'x', which is no number"),
    ],
)
def test_what_is_no_finite_number_is_refused_with_what_was_given(value, message):
    with pytest.raises(RewardError, match=message):
        as_reward(value, source="reward=f", response="x")


@pytest.fixture
def functions(tmp_path, monkeypatch):
    """A user's module with functions that pay."""
    (tmp_path / "my_pay.py").write_text(
        "import math, numpy\n"
        "def whole(response, example):\n    return numpy.float32(response == example.answer)\n"
        "def undefined(response, example):\n    return math.nan\n"
        "def undefined_when_wrong(response, example):\n    return 1 if response == example.answer else math.nan\n"
        "def too_large(response, example):\n    return 1e300\n"
        "def raises(response, example):\n    return int(response)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    yield
    sys.modules.pop("my_pay", None)


def test_a_function_that_returns_numpy_numbers_pays(functions):
    config = config_of("reward=my_pay.whole")
    task = make_task(config)
    check_rewards(config, task)
    assert [paid(config, task, text, Payer.REWARD) for text in ("2", "3")] == [1.0, 0.0]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("undefined", "reward=my_pay.undefined returned nan for "),
        ("undefined_when_wrong", "returned nan for 'no answer at all'"),
        ("too_large", r"returned 1e\+300 for "),
        (
            "raises",
            r"reward=my_pay.raises .*'no answer at all' .*my_pay.py, line 11, raised ValueError: invalid literal",
        ),
    ],
)
def test_a_function_is_tried_before_anything_is_built(functions, name, message):
    config = config_of(f"reward=my_pay.{name}")
    with pytest.raises(ValueError, match=message):
        check_rewards(config, make_task(config))


def test_a_verifier_is_held_to_it_too(functions):
    with pytest.raises(RewardError, match=r"task.verifier=my_pay.undefined returned nan for 'x'"):
        verify("my_pay.undefined", "x", EXAMPLE)


@dataclass(frozen=True)
class UndefinedVerdict(ArithmeticTask):
    """A task of a user's, whose verdict is not always a number."""

    def score(self, response: str, example: Example) -> float:
        return 1.0 if response == example.answer else math.nan


def test_a_verdict_is_a_finite_number():
    config = config_of()
    task = UndefinedVerdict(max_operand=9, operations=["plus"], forms="digits", heldout_fraction=0.1, seed=1)
    assert paid(config, task, "2", Payer.ENVIRONMENT) == 1.0
    with pytest.raises(RewardError, match=r"UndefinedVerdict.score returned nan for 'no answer at all'"):
        check_rewards(config, task)
