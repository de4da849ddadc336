"""The schedule of a step: some computed by hand, and the fewest bytes against every way to sleep that there is."""

import itertools
import random

import pytest

from trainer.plan.schedule import LoopPhase, Region, State
from trainer.plan.scheduler import solve

GIB = 2**30


def region(name, size, **options):
    """Copied whole, both ways, unless ``options`` say otherwise."""
    return Region(**{"name": name, "size_bytes": size, "leave_bytes": size, "return_bytes": size, **options})


def phase(name, uses, *, changes="", replaces="", restores="", **options):
    """Names of regions are single letters."""
    sets = {"uses": uses, "changes": changes, "replaces": replaces, "restores": restores}
    return LoopPhase(name=name, **{key: frozenset(letters) for key, letters in sets.items()}, **options)


def rows(schedule):
    """Region -> the first letters of its states: used, stays, goes, comes, asleep."""
    return {name: "".join(state.value[0] for state in states) for name, states in schedule.states.items()}


def copies(schedule):
    return {(m.region, "out" if m.to_host else "in", m.phase, m.size_bytes, m.beside) for m in schedule.moves}


IN_TURN = [phase("a", "A", changes="A"), phase("b", "B", changes="B"), phase("c", "C", changes="C")]


def test_nothing_moves_where_everything_fits():
    schedule = solve([region("A", 3), region("B", 4), region("C", 5)], IN_TURN, room_bytes=12)
    assert rows(schedule) == {"A": "uss", "B": "sus", "C": "ssu"}
    assert schedule.moves == ()
    assert {schedule.awake_bytes(name) for name in "abc"} == {12}


def test_the_cheapest_regions_that_make_room_go():
    """Every phase lacks one byte. A can sleep in b and c, B in c and a, C in a and b: A and B are the cheapest two."""
    schedule = solve([region("A", 3), region("B", 4), region("C", 5)], IN_TURN, room_bytes=11)
    assert rows(schedule) == {"A": "uaa", "B": "aua", "C": "ssu"}
    of_a = {("A", "out", "b", 3, False), ("A", "in", "a", 3, False)}
    assert copies(schedule) == of_a | {("B", "out", "c", 4, False), ("B", "in", "b", 4, False)}
    assert schedule.moved_bytes(to_host=True) == schedule.moved_bytes(to_host=False) == 3 + 4


def test_copies_run_beside_a_phase_that_has_room_for_the_region():
    """As above. Beside c there is room for one: B, the larger copy, leaves there; A comes back at the boundary."""
    regions = [region(name, size, copies_beside_work=True) for name, size in (("A", 3), ("B", 4), ("C", 5))]
    schedule = solve(regions, IN_TURN, room_bytes=11)
    assert rows(schedule) == {"A": "uaa", "B": "aug", "C": "ssu"}
    assert {("B", "out", "c", 4, True), ("A", "in", "a", 3, False)} <= copies(schedule)
    assert schedule.state("B", "c") is State.GOES
    assert schedule.awake("c") == {"B", "C"}
    assert schedule.moved_bytes(to_host=False) == 3 + 4


def test_regions_that_leave_and_come_at_one_boundary_do_so_beside_the_phase_after_it():
    """A and C have no room beside each other; B, which the saver copies, has to be gone before."""
    regions = [region("A", 5, copies_beside_work=True), region("B", 4), region("C", 5, copies_beside_work=True)]
    steps = [phase("a", "AB", changes="AB"), phase("c", "C", changes="C")]
    schedule = solve(regions, steps, room_bytes=9)
    assert copies(schedule) >= {("A", "out", "c", 5, True), ("C", "in", "c", 5, True)}
    assert {m.region for m in schedule.moves if m.swaps} == {"A", "C"}
    alone = solve([region("A", 5, copies_beside_work=True), region("C", 5)], [phase("a", "A"), steps[1]], room_bytes=9)
    assert not any(move.swaps or move.beside for move in alone.moves)


def test_what_nobody_restores_makes_room_first_and_stays_where_it_is_not_in_the_way():
    regions = [region("A", 4), region("B", 5), region("G", 3, leave_bytes=0, return_bytes=0)]
    steps = [phase("a", "A", changes="A"), phase("b", "B", changes="B"), phase("g", "G", changes="G")]
    assert rows(solve(regions, steps, room_bytes=12)) == {"A": "uss", "B": "sus", "G": "ssu"}
    schedule = solve(regions, steps, room_bytes=9)
    assert rows(schedule) == {"A": "uaa", "B": "sus", "G": "aau"}  # A alone is enough for g
    assert schedule.moved_bytes(to_host=True) == schedule.moved_bytes(to_host=False) == 4


def test_room_that_a_free_region_would_take_lets_copies_run_beside_work():
    """A has to sleep in c. Without G, which costs nothing, it can leave while b works and come back while d does."""
    regions = [region("A", 4, copies_beside_work=True), region("G", 4, leave_bytes=0, return_bytes=0)]
    steps = [phase("a", "AG", changes="A"), phase("b", "", reserve_bytes=1), phase("c", "", reserve_bytes=5)]
    steps += [phase("d", "", reserve_bytes=1)]
    assert rows(solve(regions, steps, room_bytes=8)) == {"A": "ugac", "G": "uaaa"}


def test_a_copy_serves_until_the_next_change_but_the_saver_makes_one_at_every_sleep():
    steps = [phase("a", "A", changes="A"), phase("b", "B"), phase("c", "A"), phase("d", "B")]
    for leaves_unchanged, copied in ((False, 3), (True, 6)):
        schedule = solve([region("A", 3, leaves_unchanged=leaves_unchanged), region("B", 9)], steps, room_bytes=9)
        assert rows(schedule) == {"A": "uaua", "B": "auau"}
        assert schedule.moved_bytes(to_host=True) == copied  # B never changes: its keeper has it
        assert schedule.moved_bytes(to_host=False) == 2 * 3 + 2 * 9


@pytest.mark.parametrize(("reserve", "of_source", "copied"), [(0, "uas", 0), (3, "uaa", 2)])
def test_a_rebuilt_region_comes_back_without_a_copy_where_its_source_is_awake(reserve, of_source, copied):
    """P, which e has no room for, is rebuilt from O. In f nobody uses O; where there is room, it saves P's copy."""
    rebuilt = region("P", 1, leave_bytes=0, return_bytes=2, rebuilt_from="O", rebuild_bytes=3)
    steps = [
        phase("train", "OP", changes="OP"),
        phase("e", "E", reserve_bytes=7),
        phase("f", "P", reserve_bytes=reserve),
    ]
    schedule = solve([region("O", 6), rebuilt, region("E", 2)], steps, room_bytes=9)
    assert rows(schedule) == {"O": of_source, "P": "uau", "E": "sus"}
    assert schedule.moved_bytes(to_host=False) == 6 + copied


def test_rebuilding_from_the_host_needs_room_for_a_moment():
    """9 for a moment: P does not come back for f, so it stays awake in e, for which E has to sleep in the others."""
    steps = [phase("train", "OP", changes="OP"), phase("e", "E"), phase("f", "P")]
    regions = [
        region("O", 6),
        region("P", 1, leave_bytes=0, return_bytes=1, rebuilt_from="O", rebuild_bytes=9),
        region("E", 6),
    ]
    assert rows(solve(regions, steps, room_bytes=7)) == {"O": "uaa", "P": "usu", "E": "aua"}
    full = [steps[0], phase("e", "E", reserve_bytes=1), phase("f", "P", reserve_bytes=1)]
    with pytest.raises(ValueError, match="the phase f needs"):
        solve(regions, full, room_bytes=7)


@pytest.mark.parametrize(("room", "of_a", "of_b"), [(9, "uuus", "sssu"), (7, "uuua", "aaau")])
def test_bytes_that_were_replaced_come_back_even_where_the_region_stays_awake(room, of_a, of_b):
    """A's weights, another tag's in the second phase, A's again: a copy out and one in. Where A sleeps beside B it
    comes back once more; its keeper has it already."""
    regions = [region("A", 4), region("B", 5, leave_bytes=9, return_bytes=9)]
    steps = [phase("train", "A", changes="A"), phase("other", "A", replaces="A"), phase("own", "A", restores="A")]
    schedule = solve(regions, [*steps, phase("b", "B")], room_bytes=room)
    assert rows(schedule) == {"A": of_a, "B": of_b}
    of_tags = {("A", "out", "other", 4, False), ("A", "in", "own", 4, False)}
    if room == 9:
        assert copies(schedule) == of_tags
    else:
        assert schedule.moved_bytes(to_host=True) == 4
        assert {m.size_bytes for m in schedule.moves if not m.to_host} == {4, 9}
        assert schedule.moved_bytes(to_host=False) == 4 + 4 + 9


def test_a_region_that_gets_other_bytes_anyway_comes_back_without_a_copy():
    steps = [phase("own", "A"), phase("b", "B"), phase("other", "A", replaces="A"), phase("c", "B")]
    schedule = solve([region("A", 4), region("B", 5)], steps, room_bytes=5)
    assert rows(schedule) == {"A": "uaua", "B": "auau"}
    assert {m.phase for m in schedule.moves if m.region == "A"} == {"own"}


def test_phases_that_not_every_step_has_fit_too_and_move_nothing():
    regions = [region("A", 3), region("B", 4), region("C", 5)]
    rare = phase("save", "C", reserve_bytes=2, in_every_step=False)
    schedule = solve(regions, [*IN_TURN[:2], rare], room_bytes=7)
    assert rows(schedule) == {"A": "us", "B": "su", "C": "aa"}
    assert (schedule.moves, schedule.occasional) == ((), (rare,))
    with pytest.raises(ValueError, match="the phase save needs"):
        solve(regions, [*IN_TURN[:2], phase("save", "C", reserve_bytes=3, in_every_step=False)], room_bytes=7)


def test_a_phase_that_cannot_fit_is_refused_with_what_it_needs():
    regions = [region("A", 3 * GIB), region("B", 2 * GIB), region("C", GIB)]
    steps = [phase("small", "A"), phase("large", "AB", reserve_bytes=GIB // 2)]
    message = (
        r"phase large needs 5\.50 GiB .*\(A 3\.00, B 2\.00, .* 0\.50\).* 5\.00: 0\.50 GiB are missing.*micro_batch"
    )
    with pytest.raises(ValueError, match=message):
        solve(regions, steps, room_bytes=5 * GIB)


# ---- the fewest bytes ------------------------------------------------------------------------------------------------


def bytes_of_a_step(regions, steps, awake, *, room):
    """What a step copies that keeps ``awake`` (a set of names per phase) awake, once it repeats; None if it does not
    fit. Knows nothing of gaps: goes through the phases, remembering whose keeper lacks changes."""
    size, stale = {r.name: r.size_bytes for r in regions}, set()
    for _ in range(2):
        copied = 0
        for number, step in enumerate(steps):
            reserve = step.reserve_bytes
            for r in regions:
                was, is_awake = r.name in awake[number - 1], r.name in awake[number]
                is_restored = r.name in step.restores
                goes = (was and not is_awake) or (is_restored and was)
                if goes and (r.leaves_unchanged or r.name in stale):
                    copied += r.leave_bytes
                    stale.discard(r.name)
                comes = is_awake and (not was or is_restored) and r.name not in step.replaces
                if comes and r.rebuilt_from not in awake[number]:
                    copied, reserve = copied + r.return_bytes, max(reserve, r.rebuild_bytes)
                if is_awake and not was and r.rebuilt_from and r.name not in step.uses:
                    return None  # what is rebuilt comes back for its use and not before
            if sum(size[name] for name in awake[number]) + reserve > room:
                return None
            stale |= step.changes
    return copied


def every_way_to_sleep(regions, steps):
    idle = [[r.name for r in regions if r.name not in step.uses] for step in steps]
    subsets = [
        [step.uses | set(chosen) for size in range(len(names) + 1) for chosen in itertools.combinations(names, size)]
        for step, names in zip(steps, idle, strict=True)
    ]
    return itertools.product(*subsets)


def random_problem(draw):
    """Up to four regions, some free, some of the saver's, the second sometimes rebuilt from the first."""
    names = "ABCD"[: draw.randint(2, 4)]
    regions = []
    for name in names:
        size, is_free = draw.randint(1, 6), draw.random() < 0.2
        options = {"leaves_unchanged": draw.random() < 0.3, "copies_beside_work": draw.random() < 0.5}
        leave, back = (0, 0) if is_free else (draw.randint(0, size), draw.randint(1, size))
        regions.append(region(name, size, leave_bytes=leave, return_bytes=back, **options))
    if draw.random() < 0.5 and regions[0].return_bytes:
        options = {"return_bytes": draw.randint(1, regions[0].return_bytes), "rebuild_bytes": draw.randint(0, 3)}
        regions[1] = region("B", regions[1].size_bytes, leave_bytes=0, rebuilt_from="A", **options)
    steps = []
    for number in range(draw.randint(2, 4)):
        uses = [name for name in names if draw.random() < 0.4]
        changes = [name for name in uses if draw.random() < 0.5]
        own = [r.name for r in regions if r.name in uses and not r.leaves_unchanged]
        other_bytes = [name for name in own if draw.random() < 0.3]
        which = {draw.choice(["replaces", "restores"]): [name for name in other_bytes if name not in changes]}
        steps.append(phase(str(number), uses, changes=changes, **which, reserve_bytes=draw.randint(0, 3)))
    used = [r for r in regions if any(r.name in step.uses for step in steps)]
    if len(used) < len(regions):
        return random_problem(draw)
    return regions, steps, draw.randint(4, sum(r.size_bytes for r in regions) + 3)


def test_no_way_to_sleep_moves_fewer_bytes():
    draw, solved, moving = random.Random(0), 0, 0
    while moving < 120:
        regions, steps, room = random_problem(draw)
        found = [bytes_of_a_step(regions, steps, awake, room=room) for awake in every_way_to_sleep(regions, steps)]
        fewest = min((copied for copied in found if copied is not None), default=None)
        if fewest is None:
            with pytest.raises(ValueError, match="GiB are missing"):
                solve(regions, steps, room_bytes=room)
            continue
        schedule = solve(regions, steps, room_bytes=room)
        claimed = schedule.moved_bytes(to_host=True) + schedule.moved_bytes(to_host=False)
        awake = [schedule.awake(step.name) for step in steps]
        assert claimed == fewest == bytes_of_a_step(regions, steps, awake, room=room), (regions, steps, room)
        solved, moving = solved + 1, moving + (fewest > 0)
    assert solved > moving


def test_three_trained_models_take_turns():
    """Too many regions for every way to be tried: 2 B of parameters, 12 of optimizer state and 4 of gradients each."""
    regions, steps = [], []
    for name in "ABC":
        regions += [region(name + "p", 2), region(name + "o", 12), region(name + "g", 4, leave_bytes=0, return_bytes=0)]
        steps.append(LoopPhase(name=f"forward {name}", uses=frozenset({name + "p"}), reserve_bytes=1))
    for name in "ABC":
        uses = frozenset(name + kind for kind in "pog")
        steps.append(LoopPhase(name=f"train {name}", uses=uses, changes=uses, reserve_bytes=2))
    one_role = 2 + 12 + 4 + 2
    assert solve(regions, steps, room_bytes=one_role).moved_bytes(to_host=True) == 3 * (2 + 12)
    # Room for the parameters and a second optimizer state: as with A, B and C above, two of the three go.
    assert solve(regions, steps, room_bytes=one_role + 2 * 2 + 12).moved_bytes(to_host=True) == 2 * 12
    assert solve(regions, steps, room_bytes=one_role + 2 * (2 + 12)).moves == ()
