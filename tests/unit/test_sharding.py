"""How tensor-parallel ranks cut tensors, by hand; tests/dist/test_parallel.py has real models."""

import pytest
import torch

from trainer.megatron.sharding import Sharding


def test_a_vocabulary_is_padded_to_equal_parts():
    whole = torch.arange(1.0, 11.0).view(5, 2)
    sharding = Sharding(dim=0, length=5)
    parts = [sharding.part(whole, rank=rank, ranks=4) for rank in range(4)]
    assert [part.tolist() for part in parts] == [
        [[1, 2], [3, 4]],
        [[5, 6], [7, 8]],
        [[9, 10], [0, 0]],
        [[0, 0], [0, 0]],
    ]
    assert torch.equal(sharding.join(parts), whole)
    assert all(part.shape == (2, 2) for part in parts)
    assert sharding.whole_shape(parts[0].shape) == (5, 2)


def test_gate_and_up_projection_are_cut_each():
    whole = torch.arange(8.0).view(8, 1)  # gate 0-3, up 4-7
    sharding = Sharding(dim=0, length=8, blocks=2)
    parts = [sharding.part(whole, rank=rank, ranks=2) for rank in range(2)]
    assert [part.flatten().tolist() for part in parts] == [[0, 1, 4, 5], [2, 3, 6, 7]]
    assert torch.equal(sharding.join(parts), whole)


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_columns_are_cut_too_and_what_is_not_shared_stays(ranks):
    whole = torch.arange(12.0).view(2, 6)
    sharding = Sharding(dim=1, length=6)
    parts = [sharding.part(whole, rank=rank, ranks=ranks) for rank in range(ranks)]
    assert all(part.shape == (2, 6 // ranks) for part in parts)
    assert torch.equal(sharding.join(parts), whole)
    assert Sharding().part(whole, rank=ranks - 1, ranks=ranks) is whole
    assert Sharding().join([whole] * ranks) is whole
