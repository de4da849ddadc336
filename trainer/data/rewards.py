"""What an environment answers to a response, and who pays for it: the environment, the function that ``reward`` names,
or a role."""

from __future__ import annotations

import dataclasses
import enum
import traceback
from collections.abc import Sequence

from trainer.config.schema import Config
from trainer.tasks.base import Environment, Example, Reply, ResponseInfo, Task
from trainer.tasks.verifiers import RewardError, as_reward, reward_of

_WRONG = "no answer at all"


class Payer(enum.Enum):
    """Who pays for a response."""

    ENVIRONMENT = "its verdict, from which the held-out accuracy is made"
    REWARD = "what pays in training: the function of ``reward``, or else the environment"
    JUDGE = "a role, later; until then nobody"


def reply_to(
    config: Config,
    environment: Environment,
    responses: Sequence[str],
    example: Example,
    info: ResponseInfo,
    *,
    payer: Payer,
) -> Reply:
    """The reply to the last of an episode's ``responses``; ``info`` about it goes to a reward function that takes it. A
    task is not asked where somebody else pays.

    Raises:
        RewardError: what it is paid is no finite number. What the user's code raises is passed on.
    """
    if isinstance(environment, Task) and payer is not Payer.ENVIRONMENT:
        if payer is Payer.JUDGE:
            return Reply(0.0)
        if config.reward is not None:
            return Reply(reward_of(config.reward, responses[-1], example, info))
    reply = environment.answer(responses, example)
    name = f"{type(environment).__qualname__}.{'score' if isinstance(environment, Task) else 'answer'}"
    if not isinstance(reply, Reply):
        raise RewardError(f"{name} returned {reply!r} for {responses[-1]!r}, which is no trainer.tasks.Reply")
    paid = as_reward(reply.reward, source=name, response=responses[-1])
    return dataclasses.replace(reply, reward=0.0 if payer is Payer.JUDGE else paid)


def check_rewards(config: Config, environment: Environment) -> None:
    """Let all that pays judge two made-up responses to the first question: its answer, and a wrong one.

    Raises:
        ValueError: one is paid something that is no finite number, or the user's code raises, which is said with the
            line.
    """
    example = environment.train[0]
    for response in (example.answer, _WRONG):
        info = ResponseInfo(token_count=len(response.split()), truncated=False)
        try:
            for payer in (Payer.REWARD, Payer.ENVIRONMENT):
                reply_to(config, environment, [response], example, info, payer=payer)
        except RewardError:
            raise
        except Exception as error:
            place = traceback.extract_tb(error.__traceback__)[-1]
            setting = "the task" if config.reward is None else f"reward={config.reward} or the task"
            raise ValueError(
                f"{setting} cannot judge the response {response!r} to {example.question!r}: {place.filename}, line "
                f"{place.lineno}, raised {type(error).__name__}: {error}. Any text must be given a number"
            ) from error
