"""Episodes: an engine's responses and the environment's answers to them, in turns.

What was said so far is the prompt of the next response, token by token as it was drawn; what the environment answers is
encoded once and appended. An episode ends when the environment says so, or at a limit: after ``max_turns`` responses,
or where more than ``rollout.max_prompt_tokens`` tokens would stand before the next one. So no row is longer than
``rollout.max_prompt_tokens + rollout.max_new_tokens``, which the plan counts with.

Simplified: every turn computes the keys and values of what was said before anew.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from trainer.common.seeds import seed_for
from trainer.config.schema import Config
from trainer.data.batch import RolloutBatch
from trainer.data.prompts import Prompts
from trainer.data.rewards import Payer
from trainer.megatron.groups import agreed, asked_once, context_parallel_group, gathered_of_shares, max_over_ranks
from trainer.rollout.base import Responses, RolloutEngine
from trainer.tasks.base import Example, Reply, ResponseInfo


@dataclass(frozen=True)
class Tally:
    """What happened in some episodes: how many there were, their ``turns``, the ``most_turns`` of one, how many a limit
    has ended (``limited``), and how often tools were called, failed and took too long."""

    episodes: int = 0
    turns: int = 0
    most_turns: int = 0
    limited: int = 0
    calls: int = 0
    failures: int = 0
    timeouts: int = 0

    def __add__(self, other: Tally) -> Tally:
        sums = {name: value + getattr(other, name) for name, value in vars(self).items()}
        return Tally(**sums | {"most_turns": max(self.most_turns, other.most_turns)})


@dataclass(frozen=True)
class Episodes:
    """n episodes, one a row.

    Attributes:
        responses: all that was said, [n, s]. ``response_mask`` has holes where the environment spoke, ``truncated`` is
            True also where a limit has ended the episode, ``texts`` are those of the last responses.
        rewards: n, what each was paid in all.
        turn_rewards: [n, s] fp32, what of it was paid for responses before the last, on the last token of each.
        tally: of these episodes.
    """

    responses: Responses
    rewards: list[float]
    turn_rewards: Tensor
    tally: Tally

    def batch(self, *, weights_step: int) -> RolloutBatch:
        """The batch of these episodes, on the device; see :class:`~trainer.data.batch.RolloutBatch`."""
        device, responses = torch.cuda.current_device(), self.responses
        return RolloutBatch(
            tokens=responses.tokens.to(device),
            response_mask=responses.response_mask[:, 1:].to(device),
            engine_log_probs=responses.drawn_log_probs[:, 1:].to(device),
            truncated=responses.truncated.to(device),
            scores=torch.tensor(self.rewards, dtype=torch.float32).to(device),
            turn_rewards=self.turn_rewards[:, 1:].to(device),
            weights_step=weights_step,
        )


def play(
    config: Config,
    prompts: Prompts,
    engine: RolloutEngine,
    examples: Sequence[Example],
    *,
    seed: int,
    payer: Payer,
    numbers: Sequence[int] | None = None,
    greedy: bool = False,
) -> Episodes:
    """One episode of each example; the engine is awake. Every turn has draws of its own, keyed by ``seed``, the turn
    and ``numbers``, which :meth:`~trainer.rollout.base.RolloutEngine.generate` explains. Collective over the ranks that
    share a model and, if there is more than one turn, over the data-parallel ones."""
    numbers = range(len(examples)) if numbers is None else numbers
    most = prompts.environment.max_turns
    context, said = prompts.encode(examples), [list[str]() for _ in examples]
    rewards, limited, earlier = [0.0] * len(examples), list[int](), list[tuple[int, int, float]]()
    going, whole, tally = list(range(len(examples))), None, Tally(episodes=len(examples))
    for turn in range(most):
        drawn = _drawn(
            engine,
            [context[row] for row in going],
            numbers=[numbers[row] for row in going],
            pad=prompts.pad,
            seed=seed_for(seed, "turn", step=turn) if turn else seed,
            greedy=greedy,
        )
        drawn = agreed_responses(drawn) if config.parallel.tp * config.parallel.pp > 1 else drawn
        whole = drawn if whole is None else _with_turn(whole, drawn, going, pad=prompts.pad)
        for row, text in zip(going, drawn.texts, strict=True):
            said[row].append(text)
        replies = _replies(prompts, drawn, [said[row] for row in going], [examples[row] for row in going], payer)
        tally += _tally_of(replies, turn=turn + 1)
        still = []
        for row, reply, (end, after) in zip(going, replies, _contexts(prompts, drawn, replies), strict=True):
            rewards[row] += reply.reward
            if reply.text is None:
                continue
            if turn + 1 == most or len(after) > config.rollout.max_prompt_tokens:
                limited.append(row)
                continue
            earlier.append((row, end - 1, reply.reward))
            context[row] = after
            still.append(row)
        going = still
        if turn + 1 < most and not max_over_ranks(len(going)):
            break
    assert whole is not None
    whole.truncated[limited] = True
    turn_rewards = torch.zeros(whole.log_probs.shape)
    for row, column, reward in earlier:
        turn_rewards[row, column] = reward
    return Episodes(whole, rewards, turn_rewards, tally + Tally(limited=len(limited)))


def _drawn(
    engine: RolloutEngine, prompts: Sequence[list[int]], *, numbers: Sequence[int], pad: int, **how: Any
) -> Responses:
    """A response to each prompt. Ranks that share sequences hold all weights each, so every one of them draws a part of
    the responses, and gets those of the others. Collective over these."""
    rank, ranks = context_parallel_group().rank(), context_parallel_group().size()
    own = engine.generate(list(prompts[rank::ranks]), numbers=numbers[rank::ranks], **how)
    if ranks == 1:
        return own
    parts = gathered_of_shares(_on_host(own))
    columns = max(part["tokens"].shape[1] for part in parts)
    order = [row // ranks + sum(len(part["texts"]) for part in parts[: row % ranks]) for row in range(len(prompts))]

    def whole(name: str) -> Any:
        values = [part[name] for part in parts]
        if name == "texts":
            return [list(itertools.chain(*values))[row] for row in order]
        fill = pad if name == "tokens" else 0
        wide = [functional.pad(v, (0, columns - v.shape[1]), value=fill) if v.dim() == 2 else v for v in values]
        return torch.cat(wide)[order]

    return Responses(**{name: whole(name) for name in parts[0]})


def agreed_responses(responses: Responses) -> Responses:
    """The responses, of which every rank that works on these sequences has drawn the same; where a kernel is not
    deterministic, those of the first of these ranks. Collective over these."""
    return Responses(**agreed(_on_host(responses)))


def _on_host(responses: Responses) -> dict[str, Any]:
    return {name: value.cpu() if isinstance(value, Tensor) else value for name, value in vars(responses).items()}


def _with_turn(whole: Responses, drawn: Responses, rows: Sequence[int], *, pad: int) -> Responses:
    """``whole`` [n, s] with what was drawn in one more turn of its ``rows``, whose prompts were what it had of them."""
    columns = max(whole.tokens.shape[1], drawn.tokens.shape[1])
    at = torch.tensor(rows, dtype=torch.int64, device=whole.tokens.device)

    def wide(tensor: Tensor, fill: int = 0) -> Tensor:
        return functional.pad(tensor, (0, columns - tensor.shape[1]), value=fill)

    def added(name: str) -> Tensor:
        old, new = wide(getattr(whole, name)), wide(getattr(drawn, name))
        return old.index_copy(0, at, old[at] + new)  # of masks too: no place is drawn twice

    texts = list(whole.texts)
    for row, text in zip(rows, drawn.texts, strict=True):
        texts[row] = text
    return Responses(
        tokens=wide(whole.tokens, pad).index_copy(0, at, wide(drawn.tokens, pad)),
        response_mask=added("response_mask"),
        truncated=whole.truncated.index_copy(0, at, drawn.truncated),
        texts=texts,
        log_probs=added("log_probs"),
        drawn_log_probs=added("drawn_log_probs"),
    )


def _replies(
    prompts: Prompts, drawn: Responses, said: Sequence[Sequence[str]], examples: Sequence[Example], payer: Payer
) -> list[Reply]:
    counts: Sequence[int] = drawn.response_mask.sum(1).tolist()
    infos = [ResponseInfo(*pair) for pair in zip(counts, drawn.truncated.tolist(), strict=True)]
    return asked_once(lambda: prompts.replies(said, examples, infos, payer=payer))


def _contexts(prompts: Prompts, drawn: Responses, replies: Sequence[Reply]) -> list[tuple[int, list[int]]]:
    """Of each response: how many tokens there are up to and with its last one, and these tokens with the environment's
    answer behind them (nothing where it has none)."""
    rows = [row for row, reply in enumerate(replies) if reply.text is not None]
    columns = torch.arange(1, drawn.tokens.shape[1] + 1, device=drawn.tokens.device)
    ends: list[int] = (columns * drawn.response_mask[rows]).amax(dim=1).tolist() if rows else []
    until = [tokens[:end] for tokens, end in zip(drawn.tokens[rows].tolist(), ends, strict=True)]
    answers = prompts.continued([replies[row].text or "" for row in rows], ends=[tokens[-1] for tokens in until])
    found: list[tuple[int, list[int]]] = [(0, [])] * len(replies)
    for row, end, tokens, answer in zip(rows, ends, until, answers, strict=True):
        found[row] = (end, tokens + answer)
    return found


def _tally_of(replies: Sequence[Reply], *, turn: int) -> Tally:
    outcomes = Counter(call.outcome for reply in replies for call in reply.calls)
    return Tally(
        turns=len(replies),
        most_turns=turn if replies else 0,
        calls=outcomes.total(),
        failures=outcomes["failed"],
        timeouts=outcomes["timed_out"],
    )
