"""The digest of a model: any changed bit, name or order changes it; where and how the bytes lie does not."""

import pytest
import torch

from trainer.roles.digest import _ROW, _ROWS_AT_ONCE, _coefficients, _sum, digest

SIZES = (0, 1, 7, _ROW - 1, _ROW, _ROW + 1, _ROW * _ROWS_AT_ONCE + 3)


def drawn(size, dtype=torch.float32):
    return torch.randn(size, generator=torch.Generator().manual_seed(size)).to(dtype)


def of(*tensors, name="a"):
    return digest([(name, tensors)])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64, torch.int8, torch.bool])
@pytest.mark.parametrize("size", SIZES)
def test_a_flipped_bit_anywhere_changes_it(size, dtype):
    tensor = drawn(size, dtype)
    before = of(tensor)
    assert of(tensor.clone()) == before
    for index in {0, size // 2, size - 1} if size else ():
        for bit in (1, 128):
            changed = tensor.clone()
            changed.view(torch.uint8)[index * tensor.element_size()] ^= bit
            assert of(changed) != before


def test_it_does_not_depend_on_how_a_stream_is_cut_into_tensors():
    tensor = drawn(_ROW * _ROWS_AT_ONCE + 3)
    for size in (_ROW - 1, _ROW + 5, 2 * _ROW, len(tensor)):
        assert of(*tensor.split(size)) == of(tensor), size
    assert of(tensor[3:], tensor[:3]) != of(tensor)


def test_a_sum_by_hand():
    """Word 3 of place 1 of row 2, in a stream that is long: 2**32 words and more have other coefficients again."""
    first, second = _coefficients(torch.device("cpu"))
    word = torch.tensor([3], dtype=torch.int32)
    for row in (2, 2 + _ROW, 2 + 5 * _ROW):
        expected = 3 * int(first[1]) * int(second[2]) * (2 * (row // _ROW) + 1)
        assert _sum(word, row * _ROW + 1, first, second) % 2**64 == expected % 2**64


def test_swapped_words_rows_names_and_orders_differ():
    tensor = drawn(3 * _ROW)
    a, b = ("a", [tensor]), ("b", [tensor])
    changed = (tensor.view(3, _ROW)[[1, 0, 2]].view(-1), tensor.flip(0), tensor[:-1])
    found = [digest(streams) for streams in ([a], [b], [a, b], [b, a], [a, a])] + [of(other) for other in changed]
    assert len(set(found)) == len(found)


def test_neither_strides_nor_an_odd_offset_matter():
    whole = drawn(1001, torch.bfloat16)
    assert of(whole[1:]) == of(whole[1:].clone())
    matrix = drawn(600).view(20, 30)
    assert of(matrix.T) == of(matrix.T.contiguous())
