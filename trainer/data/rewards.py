"""What a response is paid: by the function that ``reward`` names, or else by the task's verdict."""

from __future__ import annotations

import traceback

from trainer.config.schema import Config
from trainer.tasks.base import Example, ResponseInfo, Task
from trainer.tasks.verifiers import RewardError, as_reward, reward_of

_WRONG = "no answer at all"


def pay(config: Config, task: Task, response: str, example: Example, info: ResponseInfo) -> float:
    """The reward in training; ``info`` goes to a reward function that takes it.

    Raises:
        RewardError: it is no finite number. What the user's code raises is passed on.
    """
    if config.reward is None:
        return verdict(task, response, example)
    return reward_of(config.reward, response, example, info)


def verdict(task: Task, response: str, example: Example) -> float:
    """The task's verdict, from which the held-out accuracy is made. Raises as :func:`pay`."""
    return as_reward(task.score(response, example), source=f"{type(task).__qualname__}.score", response=response)


def check_rewards(config: Config, task: Task) -> None:
    """Let all that pays judge two made-up responses to the first question: its answer, and a wrong one.

    Raises:
        ValueError: one is paid something that is no finite number, or the user's code raises, which is said with the
            line.
    """
    example = task.train[0]
    for response in (example.answer, _WRONG):
        try:
            pay(config, task, response, example, ResponseInfo(token_count=len(response.split()), truncated=False))
            verdict(task, response, example)
        except RewardError:
            raise
        except Exception as error:
            place = traceback.extract_tb(error.__traceback__)[-1]
            setting = "the task" if config.reward is None else f"reward={config.reward} or the task"
            raise ValueError(
                f"{setting} cannot judge the response {response!r} to {example.question!r}: {place.filename}, line "
                f"{place.lineno}, raised {type(error).__name__}: {error}. Any text must be given a number"
            ) from error
