"""Sequences packed into one row give what padded ones give, and see nothing of each other."""

import dataclasses

import pytest
import torch

from tests.helpers.roles import VOCAB_SIZE, ddp_buffers, fresh_saver, loss_of, make_batch, make_role
from trainer.megatron.packing import PackedSequences, packed_attention
from trainer.training import step
from trainer.training.balance import balanced
from trainer.training.micro_batches import Split
from trainer.training.model_input import ModelInput

pytestmark = pytest.mark.usefixtures("saver")

FP32 = ("model.dtype=fp32", "optimizer.clip_grad=0", "model.max_length=256")
MIXTURE = ("model.num_experts=4", "model.num_experts_per_tok=2", "model.ffn_size=96", "model.router_aux_loss_coef=0.5")
LENGTHS = [1, 100, 0, 30, 7, 2]
PADDED = Split(2)


def packed(budget):
    return Split(1, budget, break_even=50.0)


def numbers_of(role, batch, split):
    """What forward passes read off the response tokens, and the values of whole responses."""
    mask = batch.response_mask
    if role.name == "critic":
        values = step.values(role, batch, split=split)
        return [values[:, :-1][mask], batch.at_the_end(values)[mask.any(1)]]
    found = step.log_probs(role, batch, temperature=0.7, vocab_size=VOCAB_SIZE, split=split)
    assert not any(numbers[~mask].any() for numbers in found)
    return [numbers[mask] for numbers in found]


def gradients(role, batch, split):
    for group in role.model.optimizer.param_groups:
        group["lr"] = 0.0
    sums = step.train_minibatch(role, batch, loss_of(role), split=split)
    return sums, torch.cat([buffer.grad_data.clone() for buffer in ddp_buffers(role)])


@pytest.mark.parametrize(
    "overrides",
    [
        (),
        ("model.qk_norm=true", "model.tie_embeddings=true"),
        ("model.qkv_bias=true",),
        MIXTURE,
        ("training.recompute=full",),
    ],
    ids=["", "qk-norm-tied", "qkv-bias", "moe", "recompute"],
)
@pytest.mark.parametrize("name", ["actor", "critic"])
def test_packed_and_padded_give_the_same_but_for_rounding(name, overrides):
    role, batch = make_role(name, *FP32, *overrides), make_batch(LENGTHS)
    expected, (expected_sums, expected_gradient) = numbers_of(role, batch, PADDED), gradients(role, batch, PADDED)
    for budget in (8, 64, 160, 1000):
        for left, right in zip(numbers_of(role, batch, packed(budget)), expected, strict=True):
            torch.testing.assert_close(left, right, rtol=1e-4, atol=1e-5)
        sums, gradient = gradients(role, batch, packed(budget))
        assert sums.keys() == expected_sums.keys()
        assert ("aux_loss_sum" in sums) == (overrides == MIXTURE)
        for key, value in sums.items():
            assert value == pytest.approx(expected_sums[key], rel=1e-4, abs=1e-6), key
        scale = expected_gradient.abs().max().item()
        torch.testing.assert_close(gradient, expected_gradient, rtol=1e-3, atol=1e-6 * scale)


@pytest.mark.parametrize("name", ["actor", "critic"])
def test_in_bf16_the_difference_is_a_rounding_too(name):
    role, batch = make_role(name, "model.max_length=256"), make_batch(LENGTHS)
    for left, right in zip(numbers_of(role, batch, packed(160)), numbers_of(role, batch, PADDED), strict=True):
        torch.testing.assert_close(left, right, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("name", ["actor", "critic"])
def test_a_sequence_sees_nothing_of_its_neighbours(name):
    """Bit for bit: the same lengths, other tokens in all other sequences."""
    role, batch = make_role(name, "model.max_length=256"), make_batch(LENGTHS)
    tokens = batch.tokens.clone()
    tokens[[0, 1, 4, 5]] = (tokens[[0, 1, 4, 5]] * 7 + 3) % VOCAB_SIZE
    other = dataclasses.replace(batch, tokens=tokens)
    results = []
    for each in (batch, other):
        found = (
            step.values(role, each, split=packed(1000))[:, :-1]
            if name == "critic"
            else step.log_probs(role, each, temperature=1.0, vocab_size=VOCAB_SIZE, split=packed(1000))[0]
        )
        results.append(found)
    mask = batch.response_mask
    assert torch.equal(results[0][3][mask[3]], results[1][3][mask[3]])
    assert not torch.equal(results[0][1][mask[1]], results[1][1][mask[1]])


def test_a_row_by_hand():
    batch = make_batch([2, 0, 1], prompt=2)
    assert batch.lengths().tolist() == [4, 0, 3]
    given = ModelInput.packed(batch, multiple=4)
    first, last = batch.tokens[0].tolist(), batch.tokens[2].tolist()
    assert given.tokens.tolist() == [[*first[:4], *last[:3], 0]]
    assert given.positions.tolist() == [[0, 1, 2, 3, 0, 1, 2, 0]]
    sequences = given.options["packed_seq_params"]
    assert (sequences.lengths, sequences.max_seqlen_q) == ((4, 3, 1), 4)
    assert sequences.cu_seqlens_q.tolist() == sequences.cu_seqlens_kv.tolist() == [0, 4, 7, 8]
    assert given.rows.tolist() == [1, 2, 5]  # what predicts the responses' tokens
    assert given.targets.tolist() == [first[2], first[3], last[2]]
    assert given.packing.sequence_of.tolist() == [0, 0, 0, 0, 2, 2, 2, 3]
    by_column = given.by_column(torch.arange(10.0, 18.0)[None])
    assert by_column.tolist() == [[10, 11, 12, 13, 0], [0] * 5, [14, 15, 16, 0, 0]]
    by_token = given.by_response_token(torch.tensor([1.0, 2.0, 3.0]))
    assert by_token.tolist() == [[0, 1, 2, 0], [0] * 4, [0, 3, 0, 0]]


@pytest.mark.parametrize("name", ["actor", "critic"])
def test_a_micro_batch_of_empty_responses_adds_nothing(name):
    role = make_role(name, *FP32)
    batch = make_batch([3, 2, 0, 0])
    sums, gradient = gradients(role, batch, packed(4))
    fresh_saver()
    role = make_role(name, *FP32)
    alone, expected = gradients(role, batch.select(slice(0, 2)), packed(4))
    assert sums["loss_count"] == alone["loss_count"] == 5
    torch.testing.assert_close(gradient, expected, rtol=1e-5, atol=1e-7)


def test_attention_over_sequences_is_attention_within_each():
    lengths = (5, 1, 9)
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(15, heads, 8, generator=generator, dtype=torch.float64) for heads in (4, 2, 2))
    attended = packed_attention(query, key, value, PackedSequences.of(lengths, device="cpu"))
    start = 0
    for length in lengths:
        q, k, v = (
            states[start : start + length].repeat_interleave(4 // states.shape[1], 1) for states in (query, key, value)
        )
        scores = torch.einsum("qhd,khd->hqk", q, k) / 8**0.5
        hidden = torch.ones(length, length).triu(1).bool()
        expected = torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, -torch.inf).softmax(-1), v)
        torch.testing.assert_close(attended[start : start + length], expected.flatten(1))
        start += length


@pytest.mark.parametrize(
    ("lengths", "minibatches", "sources"),
    [
        ([[10, 20], [30, 40]], 1, [[0, 3], [1, 2]]),
        ([[10, 20], [30, 40]], 2, [[2, 3], [0, 1]]),  # each half by itself: 30 and 10, then 40 and 20
        ([[5, 5], [5, 5]], 1, [[0, 2], [1, 3]]),
        ([[0, 0, 9], [0, 0, 9]], 1, [[0, 2, 3], [1, 4, 5]]),
    ],
)
def test_ranks_share_sequences_out_by_their_cost(lengths, minibatches, sources):
    assert balanced(lengths, Split(1, 64, minibatches, break_even=100.0)) == sources


def test_ranks_of_ragged_sequences_have_about_as_much_to_do():
    generator = torch.Generator().manual_seed(2)
    lengths = [
        (torch.rand(32, generator=generator).log() * -250 * (rank + 1)).int().add(1).tolist() for rank in range(4)
    ]
    cost = dict(enumerate(length + length**2 / 5000 for of_rank in lengths for length in of_rank))
    sources = balanced(lengths, Split(1, 4096, 2, break_even=5000.0))
    assert sorted(number for of_rank in sources for number in of_rank) == list(range(128))
    for half in (slice(0, 16), slice(16, 32)):
        own = {rank * 32 + row for rank in range(4) for row in range(32)[half]}
        assert {number for of_rank in sources for number in of_rank[half]} == own
        shares = [sum(cost[number] for number in of_rank[half]) for of_rank in sources]
        assert max(shares) < 1.1 * min(shares)
