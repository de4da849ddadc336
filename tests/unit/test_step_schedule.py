"""The schedule of a run: its regions and phases from the config, and which weights tags have a copy on the GPU."""

import pytest

from tests.helpers.composing import SMALL, config_of, footprint_of
from trainer.plan.schedule import State
from trainer.plan.step_schedule import NO_LIMIT, make_schedule, room_bytes
from trainer.rollout.engines import planned_bytes

VOCABULARY = 320
GIB = 2**30
POLICIES = ("full", "no_grads", "lean", "rebuild")


def schedule_of(*overrides, room=NO_LIMIT, **options):
    config = config_of(*SMALL, "offload=auto", *overrides)
    engine = planned_bytes(config, vocab_size=VOCABULARY)
    return make_schedule(config, vocab_size=VOCABULARY, engine=engine, room=room, **options)


def sizes_of(schedule):
    return {region.name: region.size_bytes for region in schedule.regions}


def awake_everywhere(schedule):
    return {name for name, states in schedule.states.items() if State.ASLEEP not in states}


@pytest.mark.parametrize("policy", POLICIES)
def test_with_room_for_everything_nothing_moves(policy):
    schedule = schedule_of(f"memory={policy}")
    assert schedule.moves == ()
    own = set() if policy == "rebuild" else {"actor"}  # rebuilt from main params, which are awake
    assert schedule.resident_tags == own | {"ref"}
    assert awake_everywhere(schedule) == sizes_of(schedule).keys()


def test_a_rank_copies_its_share_of_a_nodes_tag_out_and_all_of_it_back():
    two = ("memory=lean", "launch.nproc=2", "algo.micro_batch_size=1", "offload.reserve_gib=0")
    holdings = footprint_of(config_of(*SMALL, *two), vocab_size=VOCABULARY).holdings
    room = max(sum(h.train_bytes for h in holdings if h.role == role) for role in ("actor", "critic"))
    whole, one = (
        next(r for r in schedule_of(*two, f"memory.tags={tags}", room=room).regions if r.name == "actor/param")
        for tags in ("full", "node")
    )
    assert 2 * one.leave_bytes == whole.leave_bytes > 0
    assert one.return_bytes == whole.return_bytes


def test_regions_are_those_of_the_footprint():
    schedule, config = schedule_of(), config_of(*SMALL)
    planned = {f"{h.role}/{h.kind}": h.train_bytes for h in footprint_of(config, vocab_size=VOCABULARY).holdings}
    sizes = sizes_of(schedule)
    for role in ("actor", "critic"):
        assert sizes[f"{role}/param"] == planned[f"{role}/param"] + planned[f"{role}/rest"]
        assert all(sizes[f"{role}/{kind}"] == planned[f"{role}/{kind}"] for kind in ("grad", "optim"))
    assert sizes["engine"] == planned["engine/kv"]


def test_a_copy_of_the_reference_is_on_the_gpu_where_that_costs_least():
    """With less room than for everything, gradients go first, which is free; then the reference's copy, which costs one
    copy of it per step; the actor's own would cost two, and the critic's weights two of theirs."""
    sizes = sizes_of(schedule_of())
    everything, grads = sum(sizes.values()), sizes["actor/grad"] + sizes["critic/grad"]
    assert schedule_of(room=everything).moves == ()
    room = everything - grads - sizes["engine"] + sizes["actor/grad"]  # as much as train_actor has awake then
    less = schedule_of(room=room)
    assert less.moves == ()
    assert less.resident_tags == {"actor", "ref"}
    least = schedule_of(room=room - 1)
    assert least.resident_tags == {"actor"}
    [move] = least.moves
    assert (move.region, move.phase, move.to_host) == ("actor/weights/ref", "ref_log_probs", False)
    assert move.size_bytes == sizes["actor/weights/ref"]


def test_weights_that_their_main_params_rebuild_sleep_before_the_reference_does():
    sizes = sizes_of(schedule_of("memory=rebuild"))
    room = sum(sizes.values()) - sizes["critic/grad"] - sizes["engine"] - 1
    schedule = schedule_of("memory=rebuild", room=room)
    assert schedule.moves == ()
    assert schedule.resident_tags == {"ref"}
    assert schedule.state("critic/param", "train_actor") is State.ASLEEP


def test_without_a_reference_no_tag_is_switched():
    schedule = schedule_of("algo.kl.coef=0")
    assert "ref_log_probs" not in [phase.name for phase in schedule.phases]
    assert not any("weights/" in name for name in schedule.states)
    with_one_pass = schedule_of("algo.kl.coef=0", "algo.minibatches=1")
    assert "log_probs" not in [phase.name for phase in with_one_pass.phases]


def test_the_weights_of_the_step_come_back_in_training_if_nothing_needs_them_before():
    schedule = schedule_of("algo.kl.placement=loss", "algo.kl.estimator=k3", "algo.minibatches=1")
    restoring = {phase.name for phase in schedule.phases if phase.restores}
    assert restoring == {"train_actor"}


def test_offload_train_has_no_schedule_and_offload_none_only_places_tags():
    config = config_of(*SMALL)
    engine = planned_bytes(config, vocab_size=VOCABULARY)
    assert make_schedule(config, vocab_size=VOCABULARY, engine=engine, room=NO_LIMIT) is None
    resident = config_of(*SMALL, "offload=none")
    schedule = make_schedule(resident, vocab_size=VOCABULARY, engine=engine, room=NO_LIMIT)
    assert schedule.resident_tags == {"actor", "ref"}
    assert schedule.moves == ()
    whole = sum(sizes_of(schedule).values())
    tag = sizes_of(schedule)["actor/weights/ref"]
    one_less = make_schedule(resident, vocab_size=VOCABULARY, engine=engine, room=whole - 1)
    assert one_less.resident_tags == {"actor"}  # it would cross the bus twice a step
    none = make_schedule(resident, vocab_size=VOCABULARY, engine=engine, room=whole - 2 * tag)
    assert none.resident_tags == frozenset()
    assert len(none.moves) == 3
    assert make_schedule(resident, vocab_size=VOCABULARY, engine=engine, room=whole - 2 * tag - 1) is None


def test_a_step_that_does_not_fit_is_refused_before_anything_starts():
    with pytest.raises(ValueError, match="the phase train_actor needs"):
        schedule_of(room=10**6)


def test_measured_reserves_take_the_place_of_estimates():
    on_gpu = ("platform=cuda", "model.kernels=torch")
    estimated = schedule_of(*on_gpu, room=139 * GIB)
    assert all(phase.reserve_bytes > 0.8 * GIB for phase in estimated.phases)
    measured = schedule_of(*on_gpu, room=139 * GIB, reserves={"values": 123})
    assert {phase.name: phase.reserve_bytes for phase in measured.phases}["values"] == 123
    given = schedule_of(*on_gpu, "offload.reserve_gib=2", room=139 * GIB)
    assert {phase.reserve_bytes for phase in given.phases} == {2 * GIB}


@pytest.mark.parametrize(
    ("overrides", "reported", "room"),
    [((), None, NO_LIMIT), ((), 80 * GIB, 80 * GIB), (("launch.gpu_memory_gib=0.5",), 80 * GIB, GIB // 2)],
)
def test_room_is_what_is_given_or_what_the_card_reports(overrides, reported, room):
    assert room_bytes(config_of(*overrides), reported) == room


def test_in_a_phase_that_no_step_has_those_go_first_that_sleep_anyway_and_never_what_is_needed():
    schedule = schedule_of("memory=lean")
    sizes, awake = sizes_of(schedule), sorted(sizes_of(schedule))
    held = sum(sizes.values())
    assert schedule.victims(awake, needed=["critic/optim"], beside_bytes=NO_LIMIT - held) == []
    going = schedule.victims(awake, needed=["critic/optim"], beside_bytes=NO_LIMIT - held + 1)
    assert going in (["engine"], ["actor/grad"], ["critic/grad"])  # free of charge
    everything = schedule.victims(awake, needed=["critic/optim"], beside_bytes=NO_LIMIT)
    assert set(everything) == {name for name in awake if "weights/" not in name} - {"critic/optim"}
