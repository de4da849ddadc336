"""The environments that are here: what they ask, answer and pay; what the warm-up shows of them; what is refused."""

import dataclasses
import pickle

import pytest

from tests.helpers.composing import config_of
from trainer.config.pieces import make_task
from trainer.data.demonstrations import told
from trainer.tasks import Example, Reply, Task
from trainer.tasks.calculator import calculate
from trainer.tasks.guess_number import HIGHER, LOWER, NO_GUESS

NAMES = ("calculator", "guess_number")
CALL = Example("482 + 977 =", "1459")
GAME = Example("1 to 20:", "7", {"range": 20}, problem="7 of 20")


@pytest.fixture(scope="module")
def environments():
    return {name: make_task(config_of(f"task={name}")) for name in NAMES}


@pytest.mark.parametrize("name", NAMES)
def test_examples_are_a_function_of_the_fields_and_heldout_stays_held_out(environments, name):
    environment = environments[name]
    copy = pickle.loads(pickle.dumps(environment))
    assert (copy.train, copy.heldout) == (environment.train, environment.heldout)
    assert dataclasses.replace(environment, seed=2).heldout != environment.heldout
    train, heldout = ({example.problem for example in part} for part in (environment.train, environment.heldout))
    assert not train & heldout
    assert len(heldout) >= 100
    assert len(train) + len(heldout) == len(environment.train) + len(environment.heldout)


def test_a_demonstration_of_the_calculator_is_paid_in_full(environments):
    calculator = environments["calculator"]
    calls = 0
    for example in calculator.train[:200]:
        responses, answers = told(calculator, example)
        assert answers == [f" {example.answer} ="] * (len(responses) - 1)
        assert calculator.answer(responses, example) == Reply(1.0)
        calls += len(answers)
    assert 60 < calls < 100  # of two fifths of the questions
    assert dataclasses.replace(calculator, call_share=1.0).demonstration(CALL) == ["482+977", "1459"]
    assert dataclasses.replace(calculator, call_share=0.0).demonstration(CALL) == ["1459"]
    signs = {example.question.split()[1] for example in calculator.train[:50]}
    assert signs == {"+", "-"}
    assert all(not example.answer.startswith("-") for example in calculator.train)


def test_the_calculator_answers_calls_and_pays_answers(environments):
    calculator, example = environments["calculator"], CALL
    assert calculator.answer(["1459"], example) == Reply(1.0)  # by heart
    assert calculator.answer(["1460"], example) == Reply(0.0)
    assert calculator.answer([""], example) == Reply(0.0)
    reply = calculator.answer(["12+(3*4)"], example)
    assert (reply.reward, reply.text, [call.outcome for call in reply.calls]) == (0.0, " 24 =", ["ok"])
    for junk in ("12+", "__import__('os')+1", "1-a", "-" * 1000):
        reply = calculator.answer([junk], example)
        assert (reply.reward, reply.text, [call.outcome for call in reply.calls]) == (0.0, " ? =", ["failed"])


@pytest.mark.parametrize(
    ("expression", "value"),
    [("1+2*3", 7), ("(1+2)*3", 9), (" 482 + 977 ", 1459), ("-5--3", -2), ("+4", 4), ("9" * 200, int("9" * 200))],
)
def test_whole_numbers_are_calculated(expression, value):
    assert calculate(expression) == value


@pytest.mark.parametrize(
    "expression",
    [
        *("", "a", "1/2", "2**9", "1.5+1", "1j+1", "True+1", "'a'*3", "f(1)", "[1]+[2]", "1;2", "a.b", "1<2", "x:=1"),
        *("9" * 201, "(" * 150 + "1" + ")" * 40, "007+1", "~1", "lambda:1", "1+\x00"),
    ],
)
def test_nothing_else_is(expression):
    with pytest.raises(ValueError, match=r"no sum|more than 200 characters"):
        calculate(expression)


def test_guesses_are_answered_and_the_number_is_paid(environments):
    game = environments["guess_number"]
    given = {"10": LOWER, "3": HIGHER, " 6 ": HIGHER, "seven": NO_GUESS, "": NO_GUESS, "7.0": NO_GUESS, "99": LOWER}
    for response, text in given.items():
        assert game.answer([response], GAME) == Reply(0.0, text)
    assert game.answer(["10", "7"], GAME) == Reply(1.0)
    assert game.answer(["\u0667"], GAME) == Reply(0.0, NO_GUESS)  # a digit, but none of these ten


def test_the_careless_player_guesses_what_is_possible_and_halving_always_finds_it(environments):
    game = environments["guess_number"]
    found = 0
    for example in game.train:
        number, low, high = int(example.answer), 1, example.metadata["range"]
        shown = [int(guess) for guess in game.demonstration(example)]
        assert 1 <= len(shown) <= game.max_turns
        for guess in shown:
            assert low <= guess <= high
            low, high = (guess + 1, high) if number > guess else (low, guess - 1)
        found += shown[-1] == number
        assert shown == [int(guess) for guess in game.demonstration(example)]
        low, high, said = 1, example.metadata["range"], []
        while not said or game.answer(said, example).text is not None:
            said.append(str((low + high) // 2))
            number_is_more = game.answer(said, example).text == HIGHER
            low, high = (int(said[-1]) + 1, high) if number_is_more else (low, int(said[-1]) - 1)
        assert len(said) <= game.max_turns
    assert 0.3 < found / len(game.train) < 0.7  # which leaves something to be learned


def test_a_demonstration_ends_where_the_environment_does(environments):
    class Content(type(environments["guess_number"])):
        def demonstration(self, example):
            return ["1", example.answer, "8", "9"]

    game = Content(**dataclasses.asdict(environments["guess_number"]))
    assert told(game, GAME) == (["1", "7"], [HIGHER])
    assert told(dataclasses.replace(game, max_turns=1), GAME) == (["1"], [])


def test_a_task_is_the_environment_of_one_turn():
    task = make_task(config_of())
    assert isinstance(task, Task)
    assert task.max_turns == 1
    example = task.train[0]
    assert task.answer([example.answer], example) == Reply(1.0)
    assert told(task, example) == ([example.answer], [])


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ("task=calculator", "reward=tests.helpers.rewards.spread"),
            r"reward=tests\S+ with task._target_=\S+Calculator",
        ),
        (
            ("task=calculator", "algo.overlong.penalty=1", "algo.overlong.buffer=2"),
            "algo.overlong.penalty=1 with task._target_",
        ),
        (("task=calculator", "task.max_turns=0"), "task.max_turns=0: must be between 1 and 1000"),
        (("task=calculator", "task.tool_seconds=0"), "task.tool_seconds=0.0: must be between"),
        (("task=calculator", "task.operations=[times]"), r"task.operations=\['times'\] must name some of"),
        (("task=calculator", "task.digits=1"), "there are 90 different questions; use task.examples=45 or fewer"),
        (("task=calculator", "task.heldout_fraction=1"), "task.heldout_fraction=1.0 must lie between 0 and 1"),
        (("task=guess_number", "task.smallest_range=40"), "task.largest_range=30: use task.largest_range=40 or more"),
    ],
)
def test_what_cannot_work_is_refused(overrides, message):
    with pytest.raises(ValueError, match=message):
        config_of("platform=cpu", *overrides)
