"""HostArena: exactly the memory asked for, in aligned pieces that outlive it."""

import gc

import psutil
import pytest
import torch

from tests.helpers.composing import config_of
from trainer.memory import arena as arena_module
from trainer.memory.arena import HostArena, HostArenas

MIB = 1 << 20


def test_pieces_lie_one_after_the_other_and_64_byte_aligned():
    tensors = [
        torch.empty(3, 5, dtype=torch.bfloat16),
        torch.empty(7),
        torch.empty(()),
        torch.empty(65, dtype=torch.int8),
    ]
    assert HostArena.bytes_needed(tensors) == 64 + 64 + 64 + 128
    arena = HostArena(HostArena.bytes_needed(tensors), pinned=False)
    pieces = [arena.empty_like(tensor) for tensor in tensors]
    start = pieces[0].data_ptr()
    assert [piece.data_ptr() - start for piece in pieces] == [0, 64, 128, 192]
    assert start % 64 == 0
    assert [(p.shape, p.dtype) for p in pieces] == [(t.shape, t.dtype) for t in tensors]
    for number, piece in enumerate(pieces):
        piece.fill_(number + 1)
    assert [set(piece.flatten().tolist()) for piece in pieces] == [{1}, {2}, {3}, {4}]


def test_a_piece_of_a_transposed_tensor_is_contiguous():
    piece = HostArena(MIB, pinned=False).empty_like(torch.empty(3, 4).t())
    assert piece.shape == (4, 3)
    assert piece.is_contiguous()


def test_more_than_was_asked_for_is_our_own_bug():
    arena = HostArena(64, pinned=False)
    arena.empty_like(torch.empty(16))
    with pytest.raises(AssertionError, match="full"):
        arena.empty_like(torch.empty(1))


def test_an_empty_arena_gives_empty_tensors():
    assert HostArena(0, pinned=False).empty_like(torch.empty(0)).numel() == 0


def test_memory_comes_with_the_arena_and_goes_with_its_last_piece():
    def rss_mib():
        gc.collect()
        return psutil.Process().memory_info().rss / MIB

    before = rss_mib()
    arena = HostArena(64 * MIB, pinned=False)
    piece = arena.empty_like(torch.empty(16 * MIB)).fill_(1.0)
    assert rss_mib() - before == pytest.approx(64, abs=2)
    del arena
    assert piece.sum().item() == 16 * MIB
    del piece
    assert rss_mib() - before == pytest.approx(0, abs=2)


def test_an_arena_of_the_size_reserved_is_taken_once_and_others_are_made_when_asked_for():
    arenas = HostArenas(pinned=False)
    arenas.reserve({"actor/optim": 64, "critic/optim": 128})
    reserved = arenas._reserved["actor/optim"]
    assert arenas.take("actor/optim", 64) is reserved
    assert arenas.take("actor/optim", 64) is not reserved
    assert arenas.take("critic/optim", 192).size_bytes == 192
    assert not arenas._reserved


@pytest.mark.parametrize("offload", ["train", "none"])
@pytest.mark.parametrize("platform", ["cuda", "cpu"])
def test_host_memory_is_page_locked_where_a_gpu_copies_from_it(monkeypatch, platform, offload):
    """Where nothing sleeps too: a GPU switches weights tags from there."""
    page_locked_bytes = []
    monkeypatch.setattr(HostArena, "_pin", lambda arena, device: page_locked_bytes.append(arena.size_bytes))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    arenas = HostArenas.of(config_of(f"platform={platform}", f"offload={offload}"))
    arenas.reserve({"weights/ref": 128})
    arenas.take("weights/ref", 128).wait_until_ready()
    arenas.take("weights/later", 64).wait_until_ready()
    assert page_locked_bytes == ([128, 64] if platform == "cuda" else [])


def test_a_kernel_without_huge_pages_page_locks_small_ones(monkeypatch):
    monkeypatch.setattr(arena_module, "_MADV_HUGEPAGE", 1 << 20)  # advice that no kernel knows: the same EINVAL
    monkeypatch.setattr(HostArena, "_pin", lambda arena, device: arena._flat.zero_())
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    arena = HostArena(64, pinned=True)
    arena.wait_until_ready()
    assert arena.empty_like(torch.empty(16)).sum() == 0
