"""Flash attention with cumulative lengths gives what attention of one sequence after the other gives."""

import pytest
import torch

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
