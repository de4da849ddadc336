"""Held-out accuracy: its mean, and a standard error that knows that wordings of one problem are not independent."""

import dataclasses

import pytest

from trainer.config import objectives
from trainer.measure.accuracy import accuracy_of
from trainer.report.compare import Run
from trainer.report.compare_groups import group_runs
from trainer.report.compare_page import comparison_tables
from trainer.report.tables import accuracy_table, accuracy_text
from trainer.tasks.arithmetic import ArithmeticTask


def test_a_problem_for_each_question_by_hand():
    # mean 3/4, squares 3 * 1/16 + 9/16 = 3/4, so SE^2 = 4/3 * 3/4 / 16 = 1/16
    found = accuracy_of([("a", 1.0), ("b", 1.0), ("c", 0.0), ("d", 1.0)])
    assert (found.mean, found.problems) == (0.75, 4)
    assert found.standard_error == pytest.approx(0.25)


def test_wordings_of_one_problem_by_hand():
    # mean 4/6; a: 3 - 2 = 1, b: 1 - 4/3 = -1/3, c: 0 - 2/3; squares 1 + 1/9 + 4/9 = 14/9; SE^2 = 3/2 * 14/9 / 36
    verdicts = [("a", 1.0)] * 3 + [("b", 1.0), ("b", 0.0), ("c", 0.0)]
    found = accuracy_of(verdicts)
    assert found.mean == pytest.approx(4 / 6)
    assert found.problems == 3
    assert found.standard_error == pytest.approx((1.5 * 14 / 9 / 36) ** 0.5)
    assert accuracy_of(reversed(verdicts)).standard_error == pytest.approx(found.standard_error)


def test_copies_of_every_question_say_nothing_new():
    once = [("a", 1.0), ("b", 0.0), ("c", 1.0)]
    assert accuracy_of(once * 8).standard_error == pytest.approx(accuracy_of(once).standard_error)


def test_one_problem_has_no_standard_error():
    assert accuracy_of([("a", 1.0), ("a", 0.0)]) == (0.5, None, 1)


def test_wordings_of_a_sum_and_its_mirror_are_one_problem():
    task = ArithmeticTask(max_operand=3, operations=["plus", "minus"], forms="mixed", heldout_fraction=0.5, seed=1)
    problems = {}
    for example in (*task.train, *task.heldout):
        problems.setdefault(example.problem, []).append(example.question)
    assert len(problems) == 20
    assert sorted(problems["1 plus 2"])[:2] == ["1 + 2 =", "1 plus two ="]
    assert {len(wordings) for wordings in problems.values()} == {4, 8}
    assert not {example.problem for example in task.train} & {example.problem for example in task.heldout}


def test_tables_show_the_standard_error_beside_the_accuracy():
    measured = {"heldout_accuracy": 0.5, "heldout_accuracy_se": 0.0123, "heldout_problems": 248}
    later = {"step": 4, **measured, "heldout_accuracy": 0.75}
    table = accuracy_table([{"step": 0, **measured}, {"step": 2, "heldout_accuracy": 0.6}, later])
    assert table.title == "Held-out accuracy, 248 problems, with its standard error"
    assert table.rows == [("after the warm-up", "0", "50.00% ± 1.23"), ("at the end", "4", "75.00% ± 1.23")]
    assert table.totals == [("gained", "", "+25.00 points")]
    assert accuracy_text({"heldout_accuracy": 0.5, "heldout_accuracy_se": None}) == "50.00%"
    results = objectives.of_record({"asleep_backup_bytes": 1, **measured})
    assert results == {"heldout_accuracy": 0.5, "host_bytes": 1, "heldout_accuracy_se": 0.0123}


def test_the_comparison_of_runs_shows_it_too():
    run = Run(name="a", accuracies={0: 0.5, 3: 0.75, 2: 0.6}, accuracy_errors={0: 0.02, 3: 0.01})
    (row,) = comparison_tables([run], group_runs([run]))[0].rows
    assert row[5:7] == ("50.0% ± 2.0", "75.0% ± 1.0")
    without = dataclasses.replace(run, accuracy_errors={})
    assert comparison_tables([without], group_runs([without]))[0].rows[0][5:7] == ("50.0%", "75.0%")
