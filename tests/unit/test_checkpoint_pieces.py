"""Rectangles of a whole tensor: by hand, and that those of all ranks cover it once."""

import itertools
import math
import random

import pytest
import torch

from trainer.checkpoint.pieces import rectangles, rectangles_of
from trainer.megatron.sharding import Sharding


@pytest.mark.parametrize(
    ("shape", "start", "stop", "expected"),
    [
        ((5, 4), 0, 20, [((0, 0), (5, 4))]),
        ((5, 4), 4, 12, [((1, 0), (2, 4))]),
        ((5, 4), 2, 15, [((0, 2), (1, 2)), ((1, 0), (2, 4)), ((3, 0), (1, 3))]),
        ((5, 4), 5, 7, [((1, 1), (1, 2))]),
        ((5, 4), 6, 10, [((1, 2), (1, 2)), ((2, 0), (1, 2))]),
        ((5, 4), 0, 3, [((0, 0), (1, 3))]),
        ((5, 4), 9, 9, []),
        ((7,), 2, 6, [((2,), (4,))]),
        ((), 0, 1, [((), ())]),
        ((0, 4), 0, 0, []),
        (
            (2, 3, 2),
            1,
            11,
            [
                ((0, 0, 1), (1, 1, 1)),
                ((0, 1, 0), (1, 2, 2)),
                ((1, 0, 0), (1, 2, 2)),
                ((1, 2, 0), (1, 1, 1)),
            ],
        ),
    ],
)
def test_a_flat_range_as_rectangles(shape, start, stop, expected):
    assert list(rectangles(shape, start, stop)) == expected


def in_whole(flat, **arguments):
    return {tuple(offsets): tensor.tolist() for offsets, tensor in rectangles_of(torch.tensor(flat), **arguments)}


def test_gate_and_up_projection_lie_apart_in_the_whole():
    # Of 2 * 3 rows, ranks have one row and a padded one of each block: the whole's rows 0, 1 | 2, - and 3, 4 | 5, -.
    fused = Sharding(dim=0, length=6, blocks=2)
    part = [[10, 11], [12, 13], [14, 15], [16, 17]]
    flat = [element for row in part for element in row]
    arguments = {"part_shape": (4, 2), "sharding": fused, "ranks": 2}
    assert in_whole(flat, start=0, rank=0, **arguments) == {(0, 0): part[:2], (3, 0): part[2:]}
    assert in_whole(flat, start=0, rank=1, **arguments) == {(2, 0): part[:1], (5, 0): [part[2]]}
    assert in_whole(flat[3:6], start=3, rank=1, **arguments) == {(5, 0): [part[2]]}
    assert in_whole(flat[3:6], start=3, rank=0, **arguments) == {(1, 1): [[13]], (3, 0): [[14, 15]]}


def test_a_cut_of_the_second_dimension():
    rows = Sharding(dim=1, length=4)
    assert in_whole([1, 2, 3], start=1, part_shape=(2, 2), sharding=rows, rank=1, ranks=2) == {
        (0, 3): [[1]],
        (1, 2): [[2, 3]],
    }


def random_case(draw):
    """A whole tensor of unlike elements, its sharding, and numbers of tensor- and data-parallel ranks."""
    shape = [draw.randint(1, 6) for _ in range(draw.randint(1, 3))]
    dim = draw.choice([None, *range(len(shape))])
    blocks = draw.choice([1, 2]) if dim is not None else 1
    if dim is not None:
        shape[dim] *= blocks
    whole = torch.arange(1, math.prod(shape) + 1).view(shape)
    sharding = Sharding() if dim is None else Sharding(dim=dim, length=shape[dim], blocks=blocks)
    return whole, sharding, draw.randint(1, 4), draw.randint(1, 4)


def test_the_rectangles_of_all_ranks_are_the_whole_tensor_once():
    draw = random.Random(1)
    for _ in range(300):
        whole, sharding, tensor_parallel, data_parallel = random_case(draw)
        total = torch.zeros_like(whole)
        for rank in range(tensor_parallel):
            part = sharding.part(whole, rank=rank, ranks=tensor_parallel)
            shape, flat = part.shape, part.reshape(-1)
            found, seen = torch.zeros_like(whole), torch.zeros_like(whole)
            cuts = sorted(draw.randint(0, flat.numel()) for _ in range(data_parallel - 1))
            for start, stop in itertools.pairwise([0, *cuts, flat.numel()]):
                arguments = {"part_shape": shape, "sharding": sharding, "rank": rank, "ranks": tensor_parallel}
                for offsets, tensor in rectangles_of(flat[start:stop], start=start, **arguments):
                    where = tuple(slice(o, o + n) for o, n in zip(offsets, tensor.shape, strict=True))
                    found[where] = tensor
                    seen[where] += 1
                    assert tensor.untyped_storage().data_ptr() == flat.untyped_storage().data_ptr()
            assert seen.max() <= 1
            assert seen.sum() == flat.count_nonzero()  # padding is zero, nothing else is
            assert torch.equal(found, whole * seen)
            total += seen
        held = tensor_parallel if sharding.dim is None else 1
        assert torch.equal(total, torch.full_like(whole, held))
