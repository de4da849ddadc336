"""The keepers of sleeping optimizer states: what they keep comes back, and takes the memory that they say."""

import math
import os

import pytest
import torch

from tests.helpers.roles import make_role, train
from trainer.memory.arena import HostArena
from trainer.memory.arena_store import ArenaStore
from trainer.memory.disk_store import DiskStore
from trainer.memory.keeper import StateKeeper
from trainer.memory.packed_store import PackedStore, ZlibCoder
from trainer.memory.rounding import RoundedMoments, round_stochastically, stored_like
from trainer.plan.keepers import DISK_BUFFER_BYTES, DISK_BUFFERS

MIB = 2**20
pytestmark = pytest.mark.usefixtures("world")


def arena_store(pieces, directory):
    return ArenaStore(pieces, HostArena(HostArena.bytes_needed(pieces), pinned=False))


def disk_store(pieces, directory):
    return DiskStore(pieces, directory, arena=HostArena(DiskStore.buffer_bytes, pinned=False))


def packed_store(pieces, directory):
    arena = HostArena(PackedStore.uncoded_bytes(pieces), pinned=False)
    return PackedStore(pieces, arena, coder=ZlibCoder, pinned=False)


STORES = {"arena": arena_store, "disk": disk_store, "packed": packed_store}


@pytest.fixture
def folder(tmp_path):
    if os.stat(tmp_path).st_dev == os.stat("/dev/shm").st_dev:
        pytest.skip("temporary files lie in host memory")
    return tmp_path


def state(*sizes, seed=0):
    """Pieces like those of a trained optimizer: main params around 0.02, moments over many orders of magnitude."""
    generator = torch.Generator().manual_seed(seed)
    pieces = [torch.randn(size, generator=generator) * 0.02 for size in sizes]
    return [piece * 10 ** -(3.0 * number) for number, piece in enumerate(pieces)]


def bits(pieces):
    return [piece.view(torch.int32).clone() for piece in pieces]


def same_bits(pieces, expected):
    return all(torch.equal(piece.view(torch.int32), bits) for piece, bits in zip(pieces, expected, strict=True))


def sleep(keeper, pieces):
    for number, piece in enumerate(pieces):
        keeper.finish_save(number)
        piece.fill_(torch.nan)


def wake_up(keeper, pieces):
    for number in range(len(pieces)):
        keeper.start_restore(number)
    keeper.wait()


@pytest.mark.parametrize("failing", [0, 2])
@pytest.mark.parametrize("kind", STORES)
def test_a_copy_that_fails_is_made_again_with_those_after_it(kind, failing, folder, monkeypatch):
    pieces = state(64, 4096, 4096, 4096)
    keeper = StateKeeper(pieces, main_pieces=1, store=STORES[kind](pieces, folder))
    store, expected = keeper._store, bits(pieces)
    start_write = store.start_write

    def fail(number, piece):
        wait = start_write(number, piece)
        if number == failing:
            raise OSError("No space left on device")
        return wait

    monkeypatch.setattr(store, "start_write", fail)
    with pytest.raises(OSError, match="No space left"):
        sleep(keeper, pieces)
    monkeypatch.undo()
    for piece in pieces[failing:]:  # they are awake: whatever was copied of them is worth nothing
        piece.mul_(2)
    expected = [*expected[:failing], *bits(pieces[failing:])]
    for number in range(failing, len(pieces)):
        keeper.finish_save(number)
        pieces[number].fill_(torch.nan)
    wake_up(keeper, pieces)
    assert same_bits(pieces, expected)


@pytest.mark.parametrize("kind", STORES)
@pytest.mark.parametrize("sizes", [(16, 32, 0, 48), (5 * MIB, 4 * MIB + 16, 1008)], ids=["small", "large"])
def test_what_sleeps_comes_back_with_the_same_bits_however_often_it_changes(kind, sizes, folder):
    """The large one has more parts than a disk has buffers, and ends inside a sector."""
    pieces = state(*sizes)
    keeper = StateKeeper(pieces, main_pieces=1, store=STORES[kind](pieces, folder))
    for change in range(3):
        keeper.invalidate()
        for piece, new in zip(pieces, state(*sizes, seed=change), strict=True):
            piece.copy_(new)
        expected = bits(pieces)
        sleep(keeper, pieces)
        wake_up(keeper, pieces)
        assert same_bits(pieces, expected)


@pytest.mark.parametrize("kind", STORES)
def test_bits_that_no_number_has_are_kept_too(kind, folder):
    """Every sign and exponent, NaNs with payloads, infinities and subnormal numbers."""
    pieces = [torch.arange(-(2**31), 2**31, 2**12 + 1, dtype=torch.int64).to(torch.int32).view(torch.float32)]
    keeper = StateKeeper(pieces, main_pieces=0, store=STORES[kind](pieces, folder))
    expected = bits(pieces)
    sleep(keeper, pieces)
    wake_up(keeper, pieces)
    assert same_bits(pieces, expected)


@pytest.mark.parametrize("kind", STORES)
def test_main_params_of_a_sleeping_state_can_be_read(kind, folder):
    pieces = state(1000, 24, 512)
    keeper = StateKeeper(pieces, main_pieces=2, store=STORES[kind](pieces, folder))
    expected = bits(pieces)
    sleep(keeper, pieces)
    assert same_bits(keeper.read_main_params(), expected[:2])
    assert all(piece.isnan().all() for piece in pieces)


def test_an_unchanged_state_is_copied_once(folder):
    pieces = state(64, 64)
    keeper = StateKeeper(pieces, main_pieces=1, store=arena_store(pieces, folder))
    expected = bits(pieces)
    sleep(keeper, pieces)
    keeper.start_save()  # nothing to do: the copy is good
    wake_up(keeper, pieces)
    assert same_bits(pieces, expected)
    keeper.invalidate()
    pieces[1].fill_(7.0)
    sleep(keeper, pieces)
    assert keeper.host_tensors()[1].eq(7.0).all()


def test_host_copies_can_be_read_in_place_where_they_lie_as_they_are(folder):
    pieces = state(64, 80)
    for kind, expected in (("arena", True), ("disk", False), ("packed", False)):
        keeper = StateKeeper(pieces, main_pieces=1, store=STORES[kind](pieces, folder))
        keeper.start_save()
        copies = keeper.host_tensors()
        assert (copies is not None) == expected
        assert copies is None or same_bits(copies, bits(pieces))


# ---- disk ------------------------------------------------------------------------------------------------------------


def test_a_disk_takes_a_few_buffers_of_host_memory_and_no_name(folder):
    pieces = state(9 * MIB, 3)
    store = disk_store(pieces, folder)
    assert store.host_bytes == DISK_BUFFERS * DISK_BUFFER_BYTES
    assert store.disk_bytes == 36 * MIB + 4096
    assert os.fstat(store._file).st_size == store.disk_bytes
    assert os.fstat(store._file).st_nlink == 0
    assert list(folder.iterdir()) == []
    with open(f"/proc/self/fdinfo/{store._file}") as file:
        flags = next(int(line.split()[1], 8) for line in file if line.startswith("flags"))
    assert flags & os.O_DIRECT


def test_an_error_of_the_disk_reaches_whoever_waits(folder):
    pieces = state(64)
    store = disk_store(pieces, folder)
    keeper = StateKeeper(pieces, main_pieces=0, store=store)
    file, store._file = store._file, os.open("/dev/null", os.O_RDONLY)
    with pytest.raises(OSError, match="descriptor"):
        keeper.finish_save(0)
    os.close(store._file)
    store._file = file


# ---- packed ----------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("saver")
def test_a_state_after_fifty_steps_takes_at_most_ten_and_a_half_bytes_per_parameter(folder):
    role = make_role("actor")
    train(role, lr=1e-3, steps=50)
    pieces = [piece.clone() for piece in role.model.state.pieces]
    store = packed_store(pieces, folder)
    keeper = StateKeeper(pieces, main_pieces=1, store=store)
    expected = bits(pieces)
    sleep(keeper, pieces)
    assert 9 < store.host_bytes / role.model.parameter_count() <= 10.5
    wake_up(keeper, pieces)
    assert same_bits(pieces, expected)


def test_what_cannot_be_packed_takes_its_own_size(folder):
    """Random bits; and the memory of an earlier, larger code is used again."""
    noise = torch.randint(-(2**31), 2**31, (2**20,), generator=torch.Generator().manual_seed(0), dtype=torch.int64)
    pieces = [noise.to(torch.int32).view(torch.float32)]
    store = packed_store(pieces, folder)
    keeper = StateKeeper(pieces, main_pieces=0, store=store)
    for _ in range(3):
        keeper.invalidate()
        expected = bits(pieces)
        sleep(keeper, pieces)
        assert store.host_bytes == pytest.approx(4 * 2**20, rel=0.02)
        wake_up(keeper, pieces)
        assert same_bits(pieces, expected)


# ---- moments in bf16 -------------------------------------------------------------------------------------------------


def test_rounding_goes_to_a_neighbour_and_is_right_on_average():
    """1 + 3/1024 lies between bf16's 1 and 1 + 8/1024: it becomes the upper one in three of eight draws."""
    for sign in (1.0, -1.0):
        number = torch.full((2**16,), sign * (1 + 3 / 1024))
        rounded = round_stochastically(number, seed=3).float()
        assert set(rounded.tolist()) == {sign * 1.0, sign * (1 + 8 / 1024)}
        assert rounded.mean().item() == pytest.approx(number[0].item(), abs=5 * 0.0039 / math.sqrt(2**16))
    kept = torch.tensor([0.0, -0.0, 1.5, -(2.0**-120), torch.inf])
    assert torch.equal(round_stochastically(kept, seed=0).float(), kept)
    draws = [round_stochastically(number, seed=seed) for seed in (5, 5, 6)]
    assert torch.equal(draws[0], draws[1])
    assert not torch.equal(draws[0], draws[2])


@pytest.mark.parametrize("kind", ["arena", "disk"])
def test_moments_sleep_in_bf16_and_main_params_as_they_are(kind, folder):
    pieces = tuple(state(4096, 4096, 64))
    like = stored_like(pieces, main_pieces=1)
    store = RoundedMoments(STORES[kind](like, folder), main_pieces=1, seed_of=lambda number: number)
    keeper = StateKeeper(pieces, main_pieces=1, store=store)
    expected = [pieces[0].clone(), *(round_stochastically(piece, seed=n + 1) for n, piece in enumerate(pieces[1:]))]
    sleep(keeper, pieces)
    wake_up(keeper, pieces)
    assert all(torch.equal(piece, bits.float()) for piece, bits in zip(pieces, expected, strict=True))
    if kind == "arena":
        assert store.host_bytes == 4096 * 4 + 4096 * 2 + 64 * 2
    assert keeper.host_tensors() is None
