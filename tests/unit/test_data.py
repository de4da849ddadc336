"""Prompts: draws keyed by what they are for, shares that add up, batches whose masks mean what they say."""

import copy

import pytest
import torch

from tests.helpers.megatron_world import one_rank_world
from tests.helpers.roles import small_config
from trainer.common.seeds import seed_for
from trainer.data import prompts as data
from trainer.data.prompts import Prompts
from trainer.data.rewards import Payer
from trainer.tasks import Reply, ResponseInfo
from trainer.tasks.arithmetic import ArithmeticTask
from trainer.tasks.tokenizer import load_tokenizer

INFO = ResponseInfo(token_count=2, truncated=False)
TASK = ArithmeticTask(max_operand=9, operations=["plus"], forms="digits", heldout_fraction=0.2, seed=1)


@pytest.fixture(scope="module", autouse=True)
def world():
    with one_rank_world():
        yield


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(None, task=TASK, vocab_size=280)


def prompts_of(tokenizer, *overrides):
    return Prompts(small_config(*overrides), task=TASK, tokenizer=tokenizer)


def as_rank(monkeypatch, rank, size):
    monkeypatch.setattr(data, "data_parallel_rank", lambda: rank)
    monkeypatch.setattr(data, "data_parallel_size", lambda: size)


def test_the_questions_of_a_step_depend_on_seed_and_step_alone(tokenizer, monkeypatch):
    together = prompts_of(tokenizer).for_step(3)
    assert len(together) == 16
    assert together[0::2] == together[1::2]
    assert prompts_of(tokenizer).for_step(3) == together  # whatever was drawn before
    assert prompts_of(tokenizer).for_step(4) != together
    assert prompts_of(tokenizer, "seed=2").for_step(3) != together
    shares = {}
    for rank in range(4):
        as_rank(monkeypatch, rank, 4)
        prompts = prompts_of(tokenizer)
        shares |= dict(zip(prompts.response_numbers(), prompts.for_step(3), strict=True))
    assert [shares[number] for number in range(16)] == together


def test_without_replacement_every_question_is_asked_once_before_any_is_asked_again(tokenizer):
    """90 questions (9 problems of 45 are held out), 8 prompts a step: a pass ends in the middle of a step."""
    everything, asked = list(TASK.train), []
    assert len(everything) % 8 != 0
    prompts = prompts_of(tokenizer)
    for step in range(1, 2 * len(everything) // 8 + 2):
        asked += prompts.for_step(step)[::2]
    first, second = asked[: len(everything)], asked[len(everything) : 2 * len(everything)]
    as_set = {example.question for example in everything}
    assert {example.question for example in first} == {example.question for example in second} == as_set
    assert first != second  # another order
    with_it = prompts_of(tokenizer, "data.replacement=true")
    drawn = [example for step in range(1, 13) for example in with_it.for_step(step)[::2]]
    assert len({example.question for example in drawn}) < 80


def test_heldout_examples_are_shared_out_once_each(tokenizer, monkeypatch):
    heldout = TASK.heldout
    assert prompts_of(tokenizer).heldout(10_000) == list(heldout)
    shares = []
    for rank in range(3):
        as_rank(monkeypatch, rank, 3)
        shares.append(prompts_of(tokenizer).heldout(5))
    assert [len(share) for share in shares] == [2, 2, 1]
    assert sorted(example.question for share in shares for example in share) == sorted(
        example.question for example in heldout[:5]
    )


def test_a_supervised_batch_asks_for_the_answer_and_the_end(tokenizer):
    prompts = prompts_of(tokenizer)
    batch = prompts.supervised_batch(1)
    tokens, mask = batch.tokens, batch.response_mask
    assert tokens.shape[0] == 8
    assert tokens.shape[1] % 8 == 0
    assert mask.shape == (8, tokens.shape[1] - 1)
    answers = {example.question: example.answer for example in TASK.train}
    for row, row_mask in zip(tokens, mask, strict=True):
        response = row[1:][row_mask].tolist()
        first = int(row_mask.nonzero()[0]) + 1
        question = tokenizer.decode(row[:first].tolist())
        assert response[-1] == tokenizer.eos_token_id
        assert tokenizer.decode(response[:-1]) == answers[question]
        assert set(row[first + len(response) :].tolist()) <= {tokenizer.pad_token_id}
    assert torch.equal(prompts.supervised_batch(1).tokens, tokens)
    assert not torch.equal(prompts.supervised_batch(2).tokens, tokens)


def test_minibatches_cover_an_epoch_once_and_the_first_keeps_the_order(tokenizer, monkeypatch):
    prompts = prompts_of(tokenizer, "algo.minibatches=4")
    first = list(prompts.minibatch_rows(16, step=1, epoch=0))
    assert [rows.tolist() for rows in first] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11], [12, 13, 14, 15]]
    orders = []
    for step, epoch in ((1, 1), (1, 2), (2, 1)):
        rows = list(prompts.minibatch_rows(16, step=step, epoch=epoch))
        assert [len(part) for part in rows] == [4] * 4
        orders.append(torch.cat(rows).tolist())
        assert sorted(orders[-1]) == list(range(16))
        assert torch.cat(list(prompts.minibatch_rows(16, step=step, epoch=epoch))).tolist() == orders[-1]
    assert len({tuple(order) for order in orders}) == 3


@pytest.mark.parametrize("epoch", [0, 1, 2])
@pytest.mark.parametrize("ranks", [2, 4])
def test_the_same_sequences_make_a_minibatch_however_many_ranks_there_are(tokenizer, monkeypatch, epoch, ranks):
    def minibatches(size):
        """Numbers of the responses of each minibatch, of all ranks."""
        found = [set(), set()]
        for rank in range(size):
            as_rank(monkeypatch, rank, size)
            prompts = prompts_of(tokenizer, "algo.minibatches=2")
            numbers = prompts.response_numbers()
            for minibatch, rows in zip(found, prompts.minibatch_rows(len(numbers), step=3, epoch=epoch), strict=True):
                assert len(rows) == 8 // size
                minibatch |= {numbers[row] for row in rows.tolist()}
        return found

    alone = minibatches(1)
    assert minibatches(ranks) == alone
    assert alone[0] | alone[1] == set(range(16))
    assert (alone[0] == set(range(8))) == (epoch == 0)


def test_scores_are_the_tasks(tokenizer):
    prompts = prompts_of(tokenizer, "reward=null")
    examples = list(TASK.train[:2])
    replies = prompts.replies([[examples[0].answer], ["no idea"]], examples, [INFO] * 2, payer=Payer.REWARD)
    assert replies == [Reply(1.0), Reply(0.0)]
    with pytest.raises(ValueError, match="zip"):
        prompts.replies([["1"]], examples, [INFO] * 2, payer=Payer.REWARD)
    encoded = prompts.encode(examples)
    assert [tokenizer.decode(ids) for ids in encoded] == [example.question for example in examples]


def test_seeds_differ_by_everything_they_are_keyed_by():
    base = {"seed": 1, "purpose": "rollout", "step": 1, "rank": 0}
    keys = [base, *({**base, **change} for change in ({"seed": 2}, {"purpose": "x"}, {"step": 2}, {"rank": 1}))]
    seeds = [seed_for(key.pop("seed"), key.pop("purpose"), **key) for key in (dict(key) for key in keys)]
    assert len(set(seeds)) == 5
    assert all(0 <= seed < 2**31 for seed in seeds)
    assert seed_for(1, "rollout", step=1) == seeds[0]


def test_a_chat_template_wraps_questions_in_rollouts_and_in_the_warm_up(tokenizer, tmp_path):
    chat = copy.deepcopy(tokenizer)
    chat.chat_template = (
        "{% for m in messages %}<bos>{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
        "{% if add_generation_prompt %}assistant:{% endif %}"
    )
    settings = (f"tokenizer.path={tmp_path}", "tokenizer.chat_template=true")
    prompts, plain = prompts_of(chat, *settings), prompts_of(tokenizer)
    (example,) = TASK.train[:1]
    (ids,) = prompts.encode([example])
    assert tokenizer.decode(ids) == f"<bos>user: {example.question}\nassistant:"
    batch, plain_batch = prompts.supervised_batch(1), plain.supervised_batch(1)
    for row, mask, plain_row, plain_mask in zip(
        *batch.tensors().values(), *plain_batch.tensors().values(), strict=True
    ):
        assert torch.equal(row[1:][mask], plain_row[1:][plain_mask])  # the answer and the end
        assert tokenizer.decode(row[: int(mask.nonzero()[0]) + 1].tolist()).endswith("\nassistant:")
    with pytest.raises(ValueError, match=f"tokenizer.path={tmp_path} has none: use tokenizer.chat_template=false"):
        prompts_of(tokenizer, *settings)
