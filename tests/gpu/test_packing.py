"""Flash attention with cumulative lengths gives what attention of one sequence after the other gives."""

import dataclasses

import pytest
import torch

from trainer.megatron.context_parallel import ContextCut
from trainer.megatron.packing import PackedSequences, _one_sequence, packed_attention


def one_by_one(query, key, value, packed):
    parts = zip(*(states.split(packed.lengths) for states in (query, key, value)), strict=True)
    return torch.cat([_one_sequence(*states) for states in parts])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(("heads", "kv_heads", "size"), [(12, 2, 128), (4, 4, 64), (6, 3, 72), (4, 2, 20)])
def test_packed_attention_on_a_gpu(heads, kv_heads, size, dtype):
    """Grouped heads too, and what the kernel does not take: fp32, heads whose size is no multiple of 8."""
    lengths = (5, 1, 700, 64, 129)
    packed = PackedSequences.of(lengths, device="cuda")
    generator = torch.Generator("cuda").manual_seed(0)
    shapes = [(sum(lengths), count, size) for count in (heads, kv_heads, kv_heads)]
    states = [torch.randn(shape, generator=generator, device="cuda").to(dtype).requires_grad_() for shape in shapes]
    weight = torch.randn(sum(lengths), heads * size, generator=generator, device="cuda").to(dtype)
    results = []
    for attention in (packed_attention, one_by_one):
        attended = attention(*states, packed)
        results.append([attended, *torch.autograd.grad((attended * weight).sum(), states)])
    tolerance = {"rtol": 1e-4, "atol": 1e-4} if dtype == torch.float32 else {"rtol": 2e-2, "atol": 3e-2}
    for ours, theirs in zip(*results, strict=True):
        assert ours.isfinite().all()
        torch.testing.assert_close(ours, theirs, **tolerance)


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_chunk_of_a_cut_sequence_sees_all_that_comes_before_it(ranks):
    """Every rank's part by itself, with what it would have gathered from the others; and the sum of all gradients."""
    lengths, (heads, kv_heads, size) = (8 * ranks, 700 * ranks, 2 * ranks), (12, 2, 128)
    generator = torch.Generator("cuda").manual_seed(0)
    shapes = [(sum(lengths), count, size) for count in (heads, kv_heads, kv_heads)]
    states = [
        torch.randn(shape, generator=generator, device="cuda", dtype=torch.bfloat16).requires_grad_()
        for shape in shapes
    ]
    weight = torch.randn(sum(lengths), heads * size, generator=generator, device="cuda", dtype=torch.bfloat16)
    whole = packed_attention(*states, PackedSequences.of(lengths, device="cuda"))
    expected = torch.autograd.grad((whole * weight).sum(), states)
    cuts = [ContextCut.of(lengths, rank=rank, ranks=ranks) for rank in range(ranks)]
    held, found = torch.cat([cut.places for cut in cuts]).cuda(), [torch.zeros_like(each).float() for each in states]
    for cut in cuts:
        packed = PackedSequences.of(lengths, device="cuda", cut=cut)
        assert packed.sources is not None
        own, seen = cut.places.cuda(), held[packed.sources]
        given = states[0][own], *(each[seen] for each in states[1:])
        attended = packed_attention(*given, dataclasses.replace(packed, sources=None))
        torch.testing.assert_close(attended, whole[own], rtol=2e-2, atol=3e-2)
        gradients = torch.autograd.grad((attended * weight[own]).sum(), states)
        found = [total + each.float() for total, each in zip(found, gradients, strict=True)]
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs.float(), rtol=3e-2, atol=6e-2)
