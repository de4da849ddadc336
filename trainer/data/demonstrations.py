"""What the supervised warm-up shows: of each question an episode, as the environment would have answered in it."""

from __future__ import annotations

from collections.abc import Sequence

from trainer.data.encoding import Encoder
from trainer.tasks.base import Environment, Example

Told = tuple[list[str], list[str]]  # the responses of an episode, and the environment's answers between them


def told(environment: Environment, example: Example) -> Told:
    """The demonstration of a question; the environment is asked for its answers to all responses but the last."""
    responses = list(environment.demonstration(example))[: environment.max_turns]
    answers: list[str] = []
    for turn in range(1, len(responses)):
        answer = environment.answer(responses[:turn], example).text
        if answer is None:  # the environment is content already
            return responses[:turn], answers
        answers.append(answer)
    return responses, answers


def turns(
    prompts: Sequence[list[int]], demonstrations: Sequence[Told], encoder: Encoder
) -> list[list[tuple[list[int], list[int]]]]:
    """Token ids of each demonstration, turn by turn: what stands before a response, which is the prompt or the
    environment's answer to the response before, and the response with its end."""
    responses = iter(encoder.answers(response for said, _ in demonstrations for response in said))
    found = []
    for prompt, (said, answers) in zip(prompts, demonstrations, strict=True):
        own = [next(responses) for _ in said]
        between = encoder.replies(answers, ends=[ids[-1] for ids in own[: len(answers)]])
        found.append(list(zip([prompt, *between], own, strict=True)))
    return found
