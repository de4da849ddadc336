"""Phases: what is timed, sampled and counted as asleep."""

import time

import pytest

from trainer.measure.phases import Phases


def region(role, kind, state, *, released=0, backup=0):
    return {"role": role, "kind": kind, "state": state, "released_bytes": released, "backup_bytes": backup}


def test_seconds_of_a_phase_add_up_within_a_step_and_start_anew_in_the_next():
    phases = Phases(lambda record: None, gpu=False)
    for _ in range(2):
        with phases.phase("rollout", step=1):
            time.sleep(0.05)
    with phases.phase("report", step=1):
        pass
    metrics = phases.end_step()
    assert 0.1 <= metrics["seconds/rollout"] < 1.0
    assert metrics["seconds/report"] < 0.05
    assert 0 < metrics["seconds/memory_samples"] < 1.0
    assert metrics["host_rss_bytes"] > 1 << 20
    assert "seconds/rollout" not in phases.end_step()


def test_records_carry_the_step_and_phase_they_happened_in():
    records = []
    phases = Phases(records.append, gpu=False)
    with phases.phase("build", step=0):
        phases.observe(region("actor", "grad", "asleep", released=8))
    with phases.phase("train_actor", step=3):
        phases.observe(region("actor", "grad", "awake", released=8))
    assert [(record["step"], record["phase"], record.get("state")) for record in records] == [
        (0, "build", "asleep"),
        (0, "build", None),
        (3, "train_actor", "awake"),
        (3, "train_actor", None),
    ]
    sample = records[1]
    assert sample["rss_bytes"] >= sample["pss_bytes"] > 1 << 20
    assert (sample["gpu_allocated_bytes"], sample["gpu_used_bytes"]) == (None, None)


def test_the_proportional_set_is_asked_for_seldom():
    records = []
    phases = Phases(records.append, gpu=False)
    for number in range(20):
        with phases.phase("rollout", step=number):
            pass
    assert [record["pss_bytes"] is None for record in records] == [False] + [True] * 19
    assert all(record["rss_bytes"] > 1 << 20 for record in records)


def test_the_peak_of_a_step_counts_what_slept_at_the_same_time():
    phases = Phases(lambda record: None, gpu=False)
    phases.observe(region("actor", "param", "asleep", released=10, backup=0))
    phases.observe(region("critic", "param", "asleep", released=5, backup=5))
    phases.observe(region("actor", "param", "awake", released=10))
    phases.observe(region("critic", "optim", "asleep", released=4, backup=4))
    metrics = phases.end_step()
    assert (metrics["asleep_released_bytes"], metrics["asleep_backup_bytes"]) == (15, 5)
    phases.observe(region("critic", "optim", "awake"))
    metrics = phases.end_step()
    assert (metrics["asleep_released_bytes"], metrics["asleep_backup_bytes"]) == (5, 5)


def test_a_phase_that_raises_lets_the_exception_through_and_is_not_sampled():
    records = []
    phases = Phases(records.append, gpu=False)
    with pytest.raises(KeyError), phases.phase("rollout", step=1):
        raise KeyError
    assert records == []
