"""Micro-batches by length: every row once, within the budget, cut to what it needs, as many as asked for."""

import pytest
import torch

from tests.helpers.composing import SMALL, config_of
from tests.helpers.roles import make_batch
from trainer.training.micro_batches import Split, group_by_length, in_order, micro_batches, pack, split_to_count

pytestmark = pytest.mark.usefixtures("world")


def by_length(batch, budget, **more):
    return micro_batches(batch, Split(1, budget, **more))


def test_groups_are_filled_from_the_longest_down():
    # Padded to 8: 8, 16, 208, 56, 8. 208 goes alone; 56 and 16 are 112 > 100; 16, 8 and 8 are 48.
    assert group_by_length([3, 9, 203, 53, 1], token_budget=100) == [[2], [3], [1, 0, 4]]
    assert group_by_length([3, 9, 203, 53, 1], token_budget=112) == [[2], [3, 1], [0, 4]]
    assert group_by_length([0, 0], token_budget=16) == [[0, 1]]


def test_more_groups_come_from_halving_the_largest():
    size = {(2,): 208, (3, 1): 112, (0, 4): 16, (3,): 56, (1,): 16, (0,): 8, (4,): 8}
    groups = [[2], [3, 1], [0, 4]]
    assert split_to_count(groups, count=4, size=lambda group: size[tuple(group)]) == [[2], [3], [1], [0, 4]]
    assert split_to_count(groups, count=5, size=lambda group: size[tuple(group)]) == [[2], [3], [1], [0], [4]]


NEVER = float("inf")  # the length at which attention costs as much as all else


@pytest.mark.parametrize(
    ("lengths", "budget", "break_even", "groups"),
    [
        ([3, 9, 20, 5, 1], 40, NEVER, [[0, 1, 2, 3, 4]]),  # 38 tokens
        ([3, 9, 20, 5, 1], 20, NEVER, [[2], [0, 1, 3, 4]]),
        ([30, 9, 20, 5, 1], 20, NEVER, [[0], [2], [1], [3, 4]]),  # the first is longer than the budget
        # 16 tokens cost 32 with their attention, 4 cost 5: four short ones weigh less than one long one.
        ([16, 4, 4, 4, 4], 32, NEVER, [[0, 1, 2, 3, 4]]),
        ([16, 16, 4, 4, 4, 4], 32, NEVER, [[0, 2, 4], [1, 3, 5]]),
        ([16, 8, 8, 4, 4], 20, 16.0, [[0, 4], [1, 2, 3]]),
        ([0, 0], 20, 16.0, [[0, 1]]),
    ],
)
def test_packed_groups_cost_alike_and_keep_to_the_budget(lengths, budget, break_even, groups):
    assert pack(lengths, token_budget=budget, break_even=break_even) == groups


def test_a_hundred_ragged_sequences_are_packed_tightly_and_evenly():
    lengths = (torch.rand(100, generator=torch.Generator().manual_seed(1)).log() * -250).int().add(1).tolist()
    groups = pack(lengths, token_budget=2048, break_even=500.0)
    assert sorted(row for group in groups for row in group) == list(range(100))
    tokens = [sum(lengths[row] for row in group) for group in groups]
    costs = [sum(lengths[row] + lengths[row] ** 2 / 500 for row in group) for group in groups]
    assert max(tokens) <= 2048
    assert len(groups) <= 1.2 * sum(lengths) / 2048 + 1
    assert max(costs) < 1.15 * min(costs)
    assert tokens == sorted(tokens, reverse=True)


def test_a_batch_is_cut_and_comes_back_in_order():
    batch = make_batch([1, 200, 0, 50, 3], prompt=4, scores=torch.arange(5.0))
    assert batch.lengths().tolist() == [5, 204, 0, 54, 7]
    parts = by_length(batch, 111)
    assert [part.columns for part in parts] == [205, 56, 8]  # 208 is more than there is
    taken = [part.take(batch) for part in parts]
    assert [list(t.tokens.shape) for t in taken] == [[1, 205], [1, 56], [3, 8]]
    assert [t.scores.tolist() for t in taken] == [[1.0], [3.0], [4.0, 0.0, 2.0]]
    assert all(t.response_mask.shape[1] == t.tokens.shape[1] - 1 for t in taken)
    assert sum(int(t.response_mask.sum()) for t in taken) == 254
    for name in ("tokens", "advantages"):
        whole = in_order([getattr(t, name) for t in taken], parts, batch=batch)
        kept = batch.response_mask if name == "advantages" else torch.ones_like(batch.tokens, dtype=torch.bool)
        assert torch.equal(whole[kept], getattr(batch, name)[kept])


def test_each_minibatch_is_grouped_as_it_will_be_when_it_trains():
    batch = make_batch([1, 90, 2, 80, 3, 70])
    whole = by_length(batch, 200, minibatches=2)
    halves = [by_length(batch.select(rows), 200) for rows in (slice(0, 3), slice(3, 6))]
    assert [(p.rows.tolist(), p.columns) for p in whole] == [
        ((p.rows + offset).tolist(), p.columns) for offset, half in zip((0, 3), halves, strict=True) for p in half
    ]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["algo.micro_batch_tokens=35"], r"less than one sequence .* = 36: use algo.micro_batch_tokens=36"),
        (["algo.micro_batch_tokens=0"], r"algo.micro_batch_tokens=0: must be between 1 and"),
        (["algo.micro_batch_tokens=64", "algo.minibatches=3"], r"= 16 is no multiple .* = 3: use .*prompts_per_step=9"),
    ],
)
def test_budgets_that_cannot_work_are_refused(overrides, message):
    with pytest.raises(ValueError, match=message):
        config_of(*SMALL, *overrides)


def test_with_a_budget_the_number_of_sequences_need_not_divide():
    assert config_of(*SMALL, "algo.micro_batch_size=5", "algo.micro_batch_tokens=64").algo.micro_batch_tokens == 64
    with pytest.raises(ValueError, match="micro_batch_size"):
        config_of(*SMALL, "algo.micro_batch_size=5")
