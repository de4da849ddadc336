"""The hand-over of the device between two roles' optimizer states: order, room, and what is left after a failure."""

import time
from concurrent.futures import ThreadPoolExecutor
from threading import Event

import pytest
import torch

from tests.helpers.roles import make_role, train
from trainer.memory.hand_over import HandOver
from trainer.memory.saver import MemorySaver
from trainer.roles.role import FORWARD

pytestmark = pytest.mark.usefixtures("world")
PIECES = "memory.piece_mib=0.03125"


@pytest.fixture
def thread():
    with ThreadPoolExecutor(1) as executor:
        yield executor


@pytest.fixture
def events(monkeypatch):
    """Of optimizer states: ("asleep" or "awake", tag, bytes), in order."""
    found = []
    for method, state in (("sleep", "asleep"), ("wake_up", "awake")):
        original = getattr(MemorySaver, method)

        def recorded(self, tag, *args, original=original, state=state, **options):
            sizes = original(self, tag, *args, **options)
            if "/optim" in tag:
                found.append((state, tag.partition("/")[0], sizes.released_bytes))
            return sizes

        monkeypatch.setattr(MemorySaver, method, recorded)
    return found


@pytest.fixture
def roles(request, saver):
    """A trained actor, awake, and a trained critic whose state and gradients sleep; and both digests."""
    policy = f"memory={getattr(request, 'param', 'lean')}"
    critic, actor = make_role("critic", policy, PIECES, seed=2), make_role("actor", policy, PIECES)
    digests = {}
    for role in (critic, actor):
        train(role)
        digests[role.name] = role.weights_sha256()
    critic.sleep()
    critic.wake_up(kinds=FORWARD)
    return actor, critic, digests


def state_bytes(role):
    pieces = [*role.regions.state_pieces(asleep=True), *role.regions.state_pieces(asleep=False)]
    return sum(role.regions.piece_bytes(piece) for piece in pieces)


def started(actor, critic, thread, *, room_bytes, retry=None):
    hand_over = HandOver([actor.regions], critic.regions, room_bytes=room_bytes, retry=retry or (lambda: None))
    hand_over.start(thread, torch.cuda.Stream())
    return hand_over


def held(events, start):
    """What the states hold after each event."""
    sums = [start]
    for state, _, size in events:
        sums.append(sums[-1] + (size if state == "awake" else -size))
    return sums


@pytest.mark.parametrize("spare_pieces", [0, 1, 3])
def test_pieces_come_as_others_leave_and_never_more_than_fit(spare_pieces, roles, events, thread):
    actor, critic, digests = roles
    piece = actor.regions.piece_bytes(0)
    size, room = state_bytes(actor), state_bytes(actor) + spare_pieces * piece
    hand_over = started(actor, critic, thread, room_bytes=room)
    assert (actor.is_asleep("optim"), critic.is_asleep("optim")) == (True, False)
    hand_over.give_room(0)
    critic.wake_up()
    critic.regions.wait_for_optimizer_state()
    assert critic.weights_sha256() == digests["critic"]
    assert max(held(events, size)) <= room
    states = [state for state, *_ in events]
    assert states.count("asleep") == len(actor.regions.state_pieces(asleep=True)) > 5
    assert states.count("awake") == len(critic.regions.state_pieces(asleep=False)) > 5
    assert states[0] == ("awake" if spare_pieces else "asleep")
    if spare_pieces < 3:  # one leaves, one comes
        assert max(len(run) for run in "".join(s[1] for s in states).replace("sw", "s w").split()) <= 4
    actor.wake_up()
    actor.regions.wait_for_optimizer_state()
    assert actor.weights_sha256() == digests["actor"]


def test_room_that_others_leave_later_is_waited_for(roles, events, thread):
    """The states alone have no room for anything that comes until the parameters of who goes have left."""
    actor, critic, digests = roles
    hand_over = started(actor, critic, thread, room_bytes=0)
    actor.sleep(kinds={"param"})
    deadline = time.monotonic() + 60
    while actor.regions.state_pieces(asleep=False) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert {state for state, *_ in events} == {"asleep"}
    hand_over.give_room(state_bytes(critic))
    hand_over.settle()
    critic.wake_up()
    assert critic.weights_sha256() == digests["critic"]


@pytest.mark.parametrize("roles", ["rebuild"], indirect=True)
def test_main_params_can_be_read_before_all_has_come(roles, thread, monkeypatch):
    """Parameters are cast from them. The last pieces, of the moments, cannot come before that is done."""
    actor, critic, digests = roles
    critic.sleep()
    main, is_cast = critic.regions._keeper.main_pieces, Event()
    original = critic.regions.map_piece

    def map_piece(piece):
        if piece >= main:
            assert is_cast.wait(60)
        return original(piece)

    monkeypatch.setattr(critic.regions, "map_piece", map_piece)
    hand_over = started(actor, critic, thread, room_bytes=state_bytes(actor))
    hand_over.give_room(0)
    critic.wake_up()
    is_cast.set()
    assert critic.weights_sha256() == digests["critic"]


def test_without_memory_in_the_middle_both_sleep_before_it_is_tried_again(roles, events, thread, monkeypatch):
    actor, critic, digests = roles
    full, original = [], MemorySaver.wake_up

    def wake_up(self, tag):
        if tag == "critic/optim/3" and not full:
            full.append(tag)
            raise MemoryError("waking critic/optim/3 needs 2.00 GiB and 1.00 of 80.00 GiB are free")
        return original(self, tag)

    monkeypatch.setattr(MemorySaver, "wake_up", wake_up)

    def retry():
        assert actor.regions.state_pieces(asleep=False) == critic.regions.state_pieces(asleep=False) == []
        critic.regions.wake_up({"optim"}, backuper_bytes={})

    started(actor, critic, thread, room_bytes=state_bytes(actor), retry=retry).settle()
    assert full
    for role in (critic, actor):
        role.wake_up()
        assert role.weights_sha256() == digests[role.name]


def test_a_keeper_that_cannot_copy_ends_it_with_its_reason_and_loses_nothing(roles, thread, monkeypatch):
    actor, critic, digests = roles
    store = actor.regions._keeper._store
    original = store.start_write

    def start_write(number, piece):
        if number == 4:
            raise OSError("No space left on device")
        return original(number, piece)

    monkeypatch.setattr(store, "start_write", start_write)
    actor.regions.will_change()  # nothing is kept of it
    hand_over = started(actor, critic, thread, room_bytes=state_bytes(actor))
    with pytest.raises(RuntimeError, match=r"state of actor could not make room for that of critic: No space left"):
        hand_over.settle()
    assert critic.regions.state_pieces(asleep=False) == []
    assert actor.regions.state_pieces(asleep=True) == [0, 1, 2, 3]
    assert actor.is_asleep("optim")
    monkeypatch.undo()
    for role in (actor, critic):
        role.wake_up()
        assert role.weights_sha256() == digests[role.name]
