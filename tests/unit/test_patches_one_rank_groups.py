"""Groups of one rank do no collectives and change no number; larger groups go to torch."""

from __future__ import annotations

import pytest
import torch
from torch import distributed
from torch.testing._internal.distributed.fake_pg import FakeStore

import patches
from patches.probe import adam, one_rank, wrap


@pytest.fixture
def platform():
    patches.apply("cpu_platform")
    yield
    patches.revert()


def test_one_rank_calls_no_collective_and_gets_its_own_values(platform, monkeypatch):
    names = ("all_reduce", "broadcast", "barrier", "all_gather", "all_gather_into_tensor", "reduce_scatter_tensor")
    for name in names:
        monkeypatch.setattr(distributed, name, lambda *_, **__: pytest.fail("a communicator would be made"))
    patches.apply("one_rank_groups")
    own, output, gathered = torch.arange(4.0), torch.zeros(4), [torch.zeros(4)]
    with one_rank():
        assert distributed.all_reduce(own) is None
        distributed.broadcast(own, 0)
        distributed.barrier()
        distributed.all_gather(gathered, own)
        distributed.all_gather_into_tensor(output, own)
        assert torch.equal(own, torch.arange(4.0))
        assert torch.equal(gathered[0], own)
        assert torch.equal(output, own)
        distributed.reduce_scatter_tensor(output, own * 2)
        assert torch.equal(output, own * 2)
        work = distributed.all_reduce(own, async_op=True)
        assert work.wait()
    patches.revert("one_rank_groups")


def test_a_group_of_two_goes_to_torch(monkeypatch):
    calls = []
    monkeypatch.setattr(distributed, "all_reduce", lambda tensor, *_, **__: calls.append(tensor))
    patches.apply("one_rank_groups")
    distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        tensor = torch.ones(1)
        distributed.all_reduce(tensor)
    finally:
        distributed.destroy_process_group()
        patches.revert("one_rank_groups")
    assert len(calls) == 1
    assert calls[0] is tensor


def trained_weights() -> torch.Tensor:
    torch.manual_seed(3)
    chunk = wrap(torch.nn.Linear(8, 8, dtype=torch.bfloat16))
    optimizer = adam(chunk, bf16=True, params_dtype=torch.bfloat16)
    for _ in range(3):
        chunk.zero_grad_buffer()
        optimizer.zero_grad()
        chunk(torch.linspace(-1, 1, 16).view(2, 8).bfloat16()).float().square().sum().backward()
        chunk.finish_grad_sync()
        optimizer.step()
    return chunk.module.weight.detach().clone()


def test_training_with_the_distributed_optimizer_gives_the_same_bits(platform):
    patches.apply("fused_adamw")
    with one_rank():
        with_communicators = trained_weights()
        patches.apply("one_rank_groups")
        assert torch.equal(trained_weights(), with_communicators)
