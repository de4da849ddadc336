"""Accuracy over questions, and how far chance moves it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from trainer.megatron.groups import gathered
from trainer.tasks.base import Example


class Accuracy(NamedTuple):
    """``mean`` verdict over all questions; its ``standard_error``, None where there is only one problem; how many
    ``problems`` they are wordings of."""

    mean: float
    standard_error: float | None
    problems: int


def accuracy_of(verdicts: Iterable[tuple[str, float]]) -> Accuracy:
    """Of (problem, verdict) pairs, at least one.

    The verdicts on wordings of one problem stand and fall together, so the standard error is clustered by problem
    (Miller 2024, arXiv:2411.00640, section 2.2), with the usual factor for few clusters: of n verdicts on G problems

        SE^2 = G / (G - 1) * sum over problems of (sum of its s_i - mean)^2 / n^2
    """
    by_problem: defaultdict[str, list[float]] = defaultdict(list)
    for problem, verdict in verdicts:
        by_problem[problem].append(verdict)
    count, problems = sum(map(len, by_problem.values())), len(by_problem)
    mean = sum(map(sum, by_problem.values())) / count
    if problems == 1:
        return Accuracy(mean, None, problems)
    squares = sum((sum(scores) - len(scores) * mean) ** 2 for scores in by_problem.values())
    return Accuracy(mean, (problems / (problems - 1) * squares) ** 0.5 / count, problems)


def heldout_metrics(examples: Sequence[Example], verdicts: Sequence[float]) -> dict[str, float | None]:
    """What the record says of the verdicts on this rank's held-out examples and those of others. Collective."""
    found = _of_all_ranks(examples, verdicts)
    return {
        "heldout_accuracy": found.mean,
        "heldout_accuracy_se": found.standard_error,
        "heldout_problems": found.problems,
    }


def sampled_metrics(examples: Sequence[Example], verdicts: Sequence[float], *, samples: int) -> dict[str, float | None]:
    """The same of ``samples`` responses to each example, one example's after the other's: avg@k, their mean verdict,
    and pass@k, the best one's, each with its standard error. Collective."""
    own = [verdicts[i : i + samples] for i in range(0, len(verdicts), samples)]
    average = _of_all_ranks(examples, [sum(of_one) / samples for of_one in own])
    best = _of_all_ranks(examples, [max(of_one) for of_one in own])
    return {
        f"heldout_avg@{samples}": average.mean,
        f"heldout_avg@{samples}_se": average.standard_error,
        f"heldout_pass@{samples}": best.mean,
        f"heldout_pass@{samples}_se": best.standard_error,
    }


def _of_all_ranks(examples: Sequence[Example], verdicts: Sequence[float]) -> Accuracy:
    problems = [example.problem or example.question for example in examples]
    pairs = gathered(list(zip(problems, verdicts, strict=True)))
    return accuracy_of(pair for of_rank in pairs for pair in of_rank)
