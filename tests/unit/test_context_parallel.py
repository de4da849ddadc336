"""Sequences cut for several ranks: who has what, what it costs, and attention over the cuts."""

import pytest
import torch

from tests.helpers.composing import config_of
from trainer.megatron.context_parallel import ContextCut
from trainer.megatron.packing import PackedSequences, _one_sequence
from trainer.plan import activations
from trainer.plan.micro_batch import with_micro_batch_tokens
from trainer.plan.reserve import lasting_bytes
from trainer.rollout.engines import planned_bytes


def test_two_ranks_by_hand():
    """Of eight tokens the first rank has the first and last two, of four the first and the last."""
    first, second = (ContextCut.of([8, 4], rank=rank, ranks=2) for rank in range(2))
    assert first.places.tolist() == [0, 1, 6, 7, 8, 11]
    assert second.places.tolist() == [2, 3, 4, 5, 9, 10]
    assert first.lengths == second.lengths == (2, 2, 1, 1)
    assert (first.key_lengths, second.key_lengths) == ((2, 8, 1, 4), (4, 6, 2, 3))
    # Places in 0, 1, 6, 7, 8, 11 | 2, 3, 4, 5, 9, 10.
    assert second.sources.tolist() == [0, 1, 6, 7, 0, 1, 6, 7, 8, 9, 4, 10, 4, 10, 11]
    packed = PackedSequences.of((8, 4), device="cpu", cut=second)
    assert packed.positions.tolist() == [2, 3, 4, 5, 1, 2]
    assert packed.cu_seqlens_q.tolist() == [0, 2, 4, 5, 6]
    assert packed.cu_seqlens_kv.tolist() == [0, 4, 10, 12, 15]
    assert (packed.max_seqlen_q, packed.max_seqlen_kv) == (2, 6)


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_every_token_has_one_rank_and_ranks_pay_the_same(ranks):
    lengths = [2 * ranks * factor for factor in (1, 7, 3, 2)]
    cuts = [ContextCut.of(lengths, rank=rank, ranks=ranks) for rank in range(ranks)]
    assert torch.cat([cut.places for cut in cuts]).sort().values.tolist() == list(range(sum(lengths)))
    pairs = [
        sum(keys * chunk - chunk * (chunk - 1) // 2 for chunk, keys in zip(cut.lengths, cut.key_lengths, strict=True))
        for cut in cuts
    ]
    assert set(pairs) == {sum(length * (length + 1) // 2 for length in lengths) // ranks}


@pytest.mark.parametrize("ranks", [2, 4])
def test_chunks_attend_to_what_the_whole_sequences_attend_to(ranks):
    """Without a group: what all ranks hold is laid one after the other, as a gather lays it."""
    lengths = (2 * ranks, 10 * ranks)
    generator = torch.Generator().manual_seed(0)
    query, key, value = (
        torch.randn(sum(lengths), heads, 8, generator=generator, dtype=torch.float64) for heads in (4, 2, 2)
    )
    parts = zip(*(states.split(lengths) for states in (query, key, value)), strict=True)
    expected = torch.cat([_one_sequence(*states) for states in parts])
    cuts = [ContextCut.of(lengths, rank=rank, ranks=ranks) for rank in range(ranks)]
    held = torch.cat([cut.places for cut in cuts])
    for cut in cuts:
        keys = (states[held][cut.sources].split(cut.key_lengths) for states in (key, value))
        chunks = zip(query[cut.places].split(cut.lengths), *keys, strict=True)
        attended = torch.cat([_one_sequence(*states) for states in chunks])
        torch.testing.assert_close(attended, expected[cut.places])


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_activations_are_shared_but_for_the_keys_of_one_layer(recompute):
    common = ("model=bench_1b", "platform=cuda", "model.kernels=torch", "model.attention_backend=sdpa")
    common += (f"training.recompute={recompute}", "algo.micro_batch_size=1")
    one, four = (config_of(*common, f"launch.nproc={cp}", f"parallel.cp={cp}") for cp in (1, 4))
    model = one.roles["actor"].model
    gathered = 65536 * 2 * model.kv_heads * model.head_dim * 2  # bytes, once, in bf16
    how = {"vocab_size": 32768, "stage": 0}
    whole, share = (activations.training_bytes(config, "critic", tokens=65536, **how) for config in (one, four))
    assert whole / 4 <= share <= whole / 4 + 2 * gathered * 17 / 8
    assert share < 0.5 * whole


def test_the_largest_micro_batch_and_the_communicators_are_those_of_the_layout():
    """Four ranks of data parallelism share the optimizer state too, but each has whole sequences."""
    common = ("model=bench_1b", "platform=cuda", "model.kernels=torch", "model.attention_backend=sdpa")
    common += ("launch.nproc=4", "launch.gpu_memory_gib=40", "rollout.max_prompt_tokens=24")
    common += ("rollout.max_new_tokens=1000", "algo.micro_batch_tokens=auto", "algo.prompts_per_step=512")
    alone, shared = (config_of(*common, f"parallel.cp={cp}") for cp in (1, 4))
    tokens = []
    for config in (alone, shared):
        engine = planned_bytes(config, vocab_size=32768)
        tokens.append(with_micro_batch_tokens(config, vocab_size=32768, engine=engine).algo.micro_batch_tokens)
    assert 2 * tokens[0] < tokens[1] <= 4 * tokens[0]
    assert (
        lasting_bytes(shared) - lasting_bytes(alone) == 560 * 2**20
    )  # of sequences and gradients; no data parallel one
