"""Who is awake when under ``offload=auto``: a real run of one rank, its schedule, and what is done without memory."""

import pytest

from tests.helpers.composing import SMALL, config_of
from tests.helpers.invariance import scheduled_cases
from tests.helpers.recording import recorded
from tests.helpers.roles import fresh_saver, one_thread_world
from trainer import loop, worker
from trainer.measure.phases import Phases


@pytest.fixture(scope="module", autouse=True)
def _world():
    with one_thread_world():
        yield


CASES = {
    **{name: case for name, case in scheduled_cases(nproc=1).items() if "disk" not in name},
    "full": ("memory=full", "offload=auto", "launch.gpu_memory_gib=0.0029"),
    "no reference": ("offload=auto", "algo.kl.coef=0", "launch.gpu_memory_gib=0.0021"),
}


def run_of(*overrides):
    fresh_saver()
    notes = []
    run = worker.build(config_of(*SMALL, *overrides), Phases(lambda record: None, gpu=False), note=notes.append)
    return run, notes


@pytest.mark.parametrize("name", CASES)
def test_a_step_copies_the_bytes_that_were_planned(name):
    """The second of three: by then the loop has come round once, and no held-out accuracy is measured yet."""
    run, _ = run_of(*CASES[name], "algo.num_steps=3")
    outputs, records = recorded()
    loop.train(run, outputs)
    schedule, step = run.phases.turns.schedule, records[2]
    moved = [step[f"moved_to_{where}_bytes"] for where in ("host", "device")]
    planned = [schedule.moved_bytes(to_host=to_host) for to_host in (True, False)]
    # Regions that the saver copies hold whole pages.
    assert moved == pytest.approx(planned, abs=16384)
    assert any(planned) == ("everything" not in name)


@pytest.mark.parametrize("name", [name for name in CASES if "phase" in name or "engine" in name])
def test_optimizer_states_take_each_others_place_where_the_plan_says(name, monkeypatch):
    run, _ = run_of(*CASES[name])
    turns, found = run.phases.turns, []
    original = turns._hand_to

    def hand_to(coming, going):
        found.append((turns._phase, f"{coming}/optim"))
        original(coming, going)

    monkeypatch.setattr(turns, "_hand_to", hand_to)
    loop.train(run, recorded()[0])
    moves = turns.schedule.moves
    planned = [(move.phase, move.region) for move in moves if move.swaps and not move.to_host]
    assert planned
    assert found[-len(planned) :] == planned
    assert {move.phase for move in moves if move.swaps and move.to_host} == {phase for phase, _ in planned}


def test_memory_that_another_process_has_taken_is_made_up_for_once(monkeypatch):
    run, notes = run_of("offload=auto")
    critic, actor, saver = run.roles["critic"], run.roles["actor"], run.roles["actor"]._saver
    with run.phases.phase("values", step=1), critic.awake():
        pass
    critic.sleep()
    taken = [True]

    def check_room(tags):
        if "critic/param" in tags and taken and taken.pop():
            raise MemoryError("waking critic/param needs 2.00 GiB and 1.00 of 80.00 GiB are free: 1.00 GiB are missing")

    monkeypatch.setattr(saver, "check_room", check_room)
    with run.phases.phase("values", step=2), critic.awake():
        assert not critic.is_asleep("rest")
        assert actor.is_asleep("optim")
    assert len(notes) == 1
    assert notes[0].startswith("waking critic/param needs 2.00 GiB and 1.00 of 80.00 GiB are free; actor/optim")
    critic.sleep()
    taken += [True]
    run.phases.turns._ranks = 2  # the others would not know that one has made room
    with pytest.raises(MemoryError, match="are free"), run.phases.phase("values", step=3), critic.awake():
        pass
    assert len(notes) == 1


def test_a_phase_that_ran_out_of_memory_has_more_room_in_later_steps():
    run, _ = run_of("offload=auto", "launch.gpu_memory_gib=0.0045")
    turns = run.phases.turns
    before = {phase.name: phase.reserve_bytes for phase in turns.schedule.phases}
    with run.phases.phase("values", step=1), run.roles["critic"].awake():
        freed = sum(turns._sizes[name] for name in turns._idle())
        turns._evict()
    after = {phase.name: phase.reserve_bytes for phase in turns.schedule.phases}
    assert (before.pop("values"), after.pop("values")) == (0, freed)
    assert after == before
    assert turns.schedule.room_bytes - turns.schedule.awake_bytes("values") >= freed > 10**6


def test_what_the_first_step_shows_takes_the_place_of_the_estimate(monkeypatch):
    run, _ = run_of("offload=auto", "launch.gpu_memory_gib=0.0045")
    turns = run.phases.turns
    monkeypatch.setattr(turns, "_outside_bytes", lambda: 1000)
    outputs, _ = recorded()
    loop.train(run, outputs)
    assert {phase.reserve_bytes for phase in turns.schedule.phases} == {1100}
